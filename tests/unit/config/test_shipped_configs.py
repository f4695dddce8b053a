"""Every YAML file that ships is right: it loads, passes every check and renders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from published_models import write_config

from pretrainkit.config.load import load_config
from pretrainkit.config.resolve import RunFacts, resolve
from pretrainkit.config.validate import problems_of, problems_of_launch
from pretrainkit.errors import RequestError
from pretrainkit.launch.start import summarize
from pretrainkit.models.registry import read_shape

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def facts_of(facts: RunFacts, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Facts of a model by its file's name, with plenty of data."""

    def build(model: str) -> RunFacts:
        hub_name = load_config([CONFIGS / "model" / f"{model}.yaml"]).hf_model_id
        shape = read_shape(write_config(hub_name, tmp_path))
        assert facts.dataset
        return dataclasses.replace(
            facts,
            model=shape,
            tokenizer_largest_id=shape.vocab_size - 1,
            dataset=dataclasses.replace(facts.dataset, max_token_id=shape.vocab_size - 1),
            split_tokens=((10**10, 10**8, 0),),
        )

    return build


@pytest.mark.parametrize("run", sorted(path.name for path in (CONFIGS / "run").glob("*.yaml")))
def test_a_run_with_its_model_is_a_right_request(run: str, facts_of) -> None:  # type: ignore[no-untyped-def]
    model = next(path for path in (CONFIGS / "model").glob("*.yaml") if run.startswith(path.stem))
    config = load_config([model, CONFIGS / "run" / run], {"data.dataset_path": "/data", "nemo_model": "/weights"})
    facts = facts_of(model.stem)
    assert problems_of(config, facts) == []
    assert "ranks" in summarize(resolve(config, facts))


@pytest.mark.parametrize("run", sorted((CONFIGS / "run").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_run_that_continues_a_pretraining_is_refused_without_weights(run: Path) -> None:
    if not run.read_text(encoding="utf-8").startswith("# Continue "):
        assert load_config([run]).nemo_model is None
        return
    with pytest.raises(RequestError, match=r"--nemo_model: .*\.yaml:\d+ leaves it to you"):
        load_config([run])
    assert load_config([run], assignments=["nemo_model=null"]).nemo_model is None


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")))
def test_a_model_alone_is_a_right_request(model: str, facts_of) -> None:  # type: ignore[no-untyped-def]
    config = load_config([CONFIGS / "model" / f"{model}.yaml"], {"data.dataset_path": "/data"})
    assert problems_of(config, facts_of(model)) == []


@pytest.mark.parametrize("site", sorted(path.stem for path in (CONFIGS / "site").glob("*.yaml")))
def test_a_site_is_a_right_request_and_flags_win_over_it(site: str) -> None:
    config = load_config(flags={"launch.site": site})
    assert problems_of_launch(config) == []
    assert config.launch.executor in ("local", "slurm", "pbs", "sge")
    flags = {"launch.site": site, "launch.num_gpus": 3, "training.time_limit": "03:00:00"}
    changed = load_config(flags=flags, assignments=["launch.resources=[x=1]"])
    assert (changed.launch.num_gpus, changed.launch.resources) == (3, ("x=1",))
    assert changed.training.time_limit == "03:00:00"
    environment = load_config(flags={"launch.site": site, "launch.environment": {"A": "b"}}).launch.environment
    assert environment == {**config.launch.environment, "A": "b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("partitoin: gpu", ["site.yaml:1", "unknown field 'partitoin'", "did you mean partition?"]),
        ("executor: slurm\nmodules: gcc", ["site.yaml:2", "modules", "a list of strings"]),
        ("environment: {A: 1}", ["environment", "names to strings"]),
        ("chain: 3", ["unknown field 'chain'"]),
        ("launch: {partition: gpu}", ["unknown field"]),
        ("training: {max_steps: 3}", ["unknown field"]),
    ],
)
def test_a_wrong_site_is_refused_with_its_line(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(RequestError) as error:
        load_config(flags={"launch.site": str(tmp_path / "site.yaml")})
    assert all(word in str(error.value) for word in expected), str(error.value)
