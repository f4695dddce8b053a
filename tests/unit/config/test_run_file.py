"""run.json gives back exactly the run that was written, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.resolve import RunFacts, resolve
from pretrainkit.config.run_file import read_run, to_json, write_run
from pretrainkit.config.schema import InitialWeights, ResolvedRun, RopeScaling, RunConfig
from pretrainkit.errors import RequestError


@pytest.fixture
def run(config: RunConfig, facts: RunFacts) -> ResolvedRun:
    return resolve(config, facts)


def test_a_run_comes_back_exactly(run: ResolvedRun, tmp_path: Path) -> None:
    scaled = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, rope_scaling=RopeScaling(factor=32.0), rms_norm_eps=1e-6),
        dataset=dataclasses.replace(run.dataset, prefixes=("/a b", "/データ"), weights=(0.1, 0.7), max_token_id=None),
        initial_weights=InitialWeights("/somewhere", "/somewhere/else", None),
        min_lr=0.1 + 0.2,
    )
    for each in (run, scaled):
        write_run(tmp_path / "run.json", each)
        assert read_run(tmp_path / "run.json") == each


def read(value: dict[str, Any], folder: Path) -> ResolvedRun:
    (folder / "run.json").write_text(json.dumps(value), encoding="utf-8")
    return read_run(folder / "run.json")


def _set(value: dict[str, Any], path: str, new: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        value = value[section]
    value[name] = new


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (
            "config.training.sed",
            1,
            "unknown field 'config.training.sed'\n  What to do: did you mean config.training.seed?",
        ),
        ("format_version", 99, "format version 99"),
        ("max_steps", "4", "max_steps is '4' (str)"),
        ("max_steps", 4.0, "max_steps is 4.0 (float)"),
        ("max_steps", True, "max_steps is True (bool)"),
        ("max_steps", None, "max_steps is None"),
        ("model", [], "model is []"),
        ("dataset.prefixes", "abc", "dataset.prefixes is 'abc'"),
        ("dataset.prefixes", [1], "dataset.prefixes[0] is 1 (int)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_anything_unexpected_is_refused(run: ResolvedRun, path: str, new: Any, expected: str, tmp_path: Path) -> None:
    value = json.loads(json.dumps(to_json(run)))
    _set(value, path, new)
    with pytest.raises(RequestError) as error:
        read(value, tmp_path)
    assert expected in str(error.value) and "run.json" in str(error.value)


def test_a_missing_field_is_refused(run: ResolvedRun, tmp_path: Path) -> None:
    value = to_json(run)
    del value["config"]["training"]["seed"]
    with pytest.raises(RequestError, match=r"no field 'config\.training\.seed'"):
        read(value, tmp_path)


def test_a_run_of_an_older_format_is_read_with_the_defaults_of_newer_fields(run: ResolvedRun, tmp_path: Path) -> None:
    value = {**to_json(run), "format_version": 1}
    del value["start_mode"], value["config"]["training"]["async_save"]
    assert read(value, tmp_path) == run
    value = json.loads(json.dumps({**to_json(run), "format_version": 3}))
    del value["dataset"]["labels"]
    assert read(value, tmp_path) == run
    value = json.loads(json.dumps({**to_json(run), "format_version": 9}))
    del value["model"]["features"]["global_attention"]
    assert read(value, tmp_path) == run


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=r"run\.json"):
        read_run(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        read_run(tmp_path / "run.json")
