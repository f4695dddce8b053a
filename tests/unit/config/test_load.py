"""YAML, flags and --set become one config, or an error that says where and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.config.load import load_config
from pretrainkit.config.schema import RunConfig
from pretrainkit.errors import RequestError


@pytest.fixture
def yaml_file(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(*args, **kwargs) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError) as error:
        load_config(*args, **kwargs)
    return str(error.value)


def test_flags_win_over_files_and_later_files_over_earlier_ones(yaml_file) -> None:  # type: ignore[no-untyped-def]
    first = yaml_file("experiment: a\ntraining: {max_steps: 1, seed: 1}\noptimizer: {lr: 1e-4}\n", "first.yaml")
    second = yaml_file("experiment: b\ntraining:\n  max_steps: 2\n", "second.yaml")
    config = load_config([first, second], {"training.max_steps": 3}, ["data.split=8,1,1"])
    assert (config.experiment, config.training.max_steps, config.training.seed) == ("b", 3, 1)
    assert (config.optimizer.lr, config.data.split) == (1e-4, "8,1,1")


def test_a_value_that_a_file_leaves_open_is_asked_for_and_replaces_none(yaml_file) -> None:  # type: ignore[no-untyped-def]
    open_file = yaml_file("nemo_model: ???\ntraining:\n  seed: ???\n", "open.yaml")
    found = message([open_file])
    assert "--nemo_model: " in found and "open.yaml:1 leaves it to you" in found and "open.yaml:3" in found
    assert "give it, or --set nemo_model=null for random weights" in found
    given = yaml_file("nemo_model: /weights\n", "given.yaml")
    for files in ([given, open_file], [open_file, given]):
        config = load_config(files, {"training.seed": 3})
        assert (config.nemo_model, config.training.seed) == ("/weights", 3)


def test_an_empty_file_asks_for_nothing(yaml_file) -> None:  # type: ignore[no-untyped-def]
    assert load_config([yaml_file("# nothing\n")]) == RunConfig()
    assert load_config([yaml_file("training:\n")]) == RunConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:\n  sequence_lenght: 1", ["run.yaml:2", "data.sequence_lenght", "did you mean data.sequence_length?"]),
        ("global_batch_size: 8", ["run.yaml:1", "did you mean training.global_batch_size?"]),
        ("\nlr: 8", ["run.yaml:2", "did you mean optimizer.lr?"]),
        ("zzz: 1", ["run.yaml:1", "zzz", "docs/options.md"]),
        ("optimiser: {lr: 1}", ["run.yaml:1", "unknown section 'optimiser'", "training", "did you mean optimizer?"]),
        ("training: {max_steps: 1.5}", ["training.max_steps is 1.5 (float)", "an integer or null"]),
        ("training: {max_steps: many}", ["training.max_steps is 'many' (str)", "an integer or null"]),
        ("training: {seed: true}", ["training.seed is True (bool)", "an integer"]),
        ("optimizer: {lr: high}", ["optimizer.lr is 'high'", "a number"]),
        ("launch: {num_nodes: null}", ["launch.num_nodes is None", "an integer"]),
        ("data: {split: [8, 1, 1]}", ["data.split is [8, 1, 1] (list)", "a string"]),
        ("experiment: 001", ["experiment is 1 (int)", "a string", "put it in quotes"]),
        ("parallel: {sequence_parallel: 2}", ["parallel.sequence_parallel is 2", "true or false or null"]),
        ("optimizer: 3", ["optimizer is 3", "fields below 'optimizer:'"]),
        ("- a", ["run.yaml", "field: value"]),
        ("training: {max_steps: 1", ["run.yaml:1", "not valid YAML"]),
        ("experiment: a\nexperiment: b", ["run.yaml", "not valid YAML", "duplicate"]),
        ("experiment: ${nothing}", ["run.yaml", "nothing"]),
    ],
    ids=lambda value: value.replace("\n", " ")[:40] if isinstance(value, str) else "",
)
def test_a_wrong_file_is_told_with_file_field_found_and_needed(yaml_file, text, expected) -> None:  # type: ignore[no-untyped-def]
    told = message([yaml_file(text)])
    assert [part for part in expected if part not in told] == []


def test_a_file_that_is_not_there_is_named() -> None:
    assert "nowhere.yaml: can't be read: No such file" in message([Path("nowhere.yaml")])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("optimizer.lr", "no '='"),
        ("optimizer.rl=1", "unknown field 'optimizer.rl'"),
        ("training.seed=x", "training.seed is 'x'"),
        ("training.seed={", "can't be read as a value"),
    ],
)
def test_a_wrong_assignment_is_told(assignment: str, expected: str) -> None:
    told = message([], {}, [assignment])
    assert f"--set {assignment}" in told and expected in told


@pytest.mark.parametrize(
    ("assignment", "field", "value"),
    [
        ("experiment=001", "experiment", "001"),
        ("experiment=true", "experiment", "true"),
        ("experiment=a=b", "experiment", "a=b"),
        ("nemo_model=null", "nemo_model", None),
        ("hf_model_id=~/my model", "hf_model_id", "~/my model"),
    ],
)
def test_text_is_taken_as_it_was_typed(assignment: str, field: str, value: str | None) -> None:
    assert getattr(load_config(assignments=[assignment]), field) == value


def test_set_takes_dashes_and_null() -> None:
    config = load_config(assignments=["training.max-steps=4", "parallel.sequence_parallel=false"])
    assert (config.training.max_steps, config.parallel.sequence_parallel) == (4, False)
    assert load_config(assignments=["training.max_steps=null"]).training.max_steps is None


def test_a_field_that_is_given_twice_is_refused_unless_both_agree() -> None:
    assert "given twice" in message([], {"optimizer.lr": 1e-3}, ["optimizer.lr=1e-4"])
    assert load_config([], {"optimizer.lr": 1e-3}, ["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_all_problems_are_told_at_once(yaml_file) -> None:  # type: ignore[no-untyped-def]
    told = message([yaml_file("a: 1\nb: 2\n"), Path("nowhere.yaml")], {}, ["c=3"])
    assert "4 problems" in told


def test_off_in_yaml_is_the_choice_of_that_name(yaml_file) -> None:  # type: ignore[no-untyped-def]
    training = load_config([yaml_file("training: {async_save: off}\n")]).training
    assert training.async_save == "off"
