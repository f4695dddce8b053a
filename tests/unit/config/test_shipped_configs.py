"""Every YAML file that ships is right: it loads, passes every check and renders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pretrainkit.config.checks import problems_of
from pretrainkit.config.fields import FIELDS
from pretrainkit.config.load import load_config
from pretrainkit.config.resolve import RunFacts, resolve
from pretrainkit.config.schema import ModelShape
from pretrainkit.launch.summary import summarize

CONFIGS = Path(__file__).parents[3] / "configs"
SMOLLM2_135M = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, 1e-5, True)


@pytest.fixture
def facts_of(facts: RunFacts):  # type: ignore[no-untyped-def]
    """Facts of a model by its file's name, with plenty of data."""

    def build(model: str) -> RunFacts:
        shape = SMOLLM2_135M if model == "smollm2-135m" else facts.model
        assert shape and facts.dataset
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
    config = load_config([model, CONFIGS / "run" / run], {"data.dataset_path": "/data"})
    facts = facts_of(model.stem)
    assert problems_of(config, facts) == []
    assert config.experiment in load_config([CONFIGS / "run" / run]).experiment
    assert "ranks" in summarize(resolve(config, facts))


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")))
def test_a_model_alone_is_a_right_request(model: str, facts_of) -> None:  # type: ignore[no-untyped-def]
    config = load_config([CONFIGS / "model" / f"{model}.yaml"], {"data.dataset_path": "/data"})
    assert problems_of(config, facts_of(model)) == []


def test_the_readme_lists_every_field() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert [name for name in FIELDS if f"`{name.rpartition('.')[2]}`" not in text] == []
