"""A batch that gives NaN changes no weight: the run stops, or leaves it out on every rank alike.

The model's embedding of a token that text never holds is infinite; documents with that token are the bad ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path

pytestmark = pytest.mark.integration
BAD_TOKEN = 2


@pytest.fixture(scope="module")
def model(make_hf_llama: Callable[..., Path]) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_hf_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.checkpoint.plan import Options

    folder = tmp_path_factory.mktemp("start") / "nemo"
    convert(model, folder, Options(allow_nonfinite=True))
    return folder


def poisoned(prefix: Path, copy: Path, every: int) -> Path:
    """A copy of a dataset in which every so-and-so-many-th token is the bad one."""
    import numpy as np

    shutil.copy(idx_path(prefix), idx_path(copy))
    tokens = np.fromfile(bin_path(prefix), dtype=np.uint16)
    tokens[::every] = BAD_TOKEN
    tokens.tofile(bin_path(copy))
    return copy


def events(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == "bad_loss"]


def test_a_skipped_step_changes_no_weight(
    model: Path, start: Path, tmp_path: Path, dataset_prefix: Path, train_tiny: Callable[..., Any], assert_same: Any
) -> None:
    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.checkpoint.plan import Options

    data = poisoned(dataset_prefix, tmp_path / "bad", every=64)
    settings = {"initial_checkpoint": start, "dataset": data, "max_steps": 2, "on_bad_loss": "skip"}
    records = train_tiny(model, "all bad", **settings)
    assert [event["step"] for event in events(records)] == [1, 2]
    assert [record["loss"] for record in records if "loss" in record] == [None, None]
    convert(tmp_path / "all bad" / "checkpoints" / "step_00000002", tmp_path / "back", Options(allow_nonfinite=True))
    assert_same(model, tmp_path / "back")


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP=2": {"tensor": 2},
    "PP=2": {"pipeline": 2},
    "DP=2": {"data_parallel": 2},
}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the first layout did, for the others to be compared with."""
    return {}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_skips_the_same_steps(
    model: Path,
    start: Path,
    tmp_path: Path,
    dataset_prefix: Path,
    train_tiny: Callable[..., Any],
    seen: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    data = poisoned(dataset_prefix, tmp_path / "bad", every=1400)
    settings = {"initial_checkpoint": start, "dataset": data, "max_steps": 6, "on_bad_loss": "skip"}
    records = train_tiny(model, "some bad", **settings, **layout)
    losses = [record["loss"] for record in records if "loss" in record]
    bad = [(event["step"], event["first_sample"], event["documents"][str(data)]) for event in events(records)]
    assert 0 < len(bad) < 5 and all(first == 4 * (step - 1) for step, first, _ in bad)
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [step for step, _, _ in bad]
    dataset = IndexedDataset(data)
    for _, _, documents in bad:
        assert any(BAD_TOKEN in dataset.document(document) for document in documents)
    if not seen:
        seen.update(losses=losses, bad=bad)
    assert bad == [(step, first, documents) for step, first, documents in seen["bad"]]
    good = [loss for loss in losses if loss is not None]
    assert good == pytest.approx([loss for loss in seen["losses"] if loss is not None], abs=1e-6)


def test_the_run_stops_without_saving_and_is_not_started_for_ever(
    model: Path, start: Path, tmp_path: Path, dataset_prefix: Path, train_tiny: Callable[..., Any]
) -> None:
    data = poisoned(dataset_prefix, tmp_path / "bad", every=64)
    for _ in range(4):
        with pytest.raises(AssertionError, match=r"step 1: the loss is nan(.|\n)*--on_bad_loss skip"):
            train_tiny(model, "stopped", initial_checkpoint=start, dataset=data)
    experiment = tmp_path / "stopped"
    last = json.loads((experiment / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "bad_loss" and last["documents"][str(data)] and not last["skipped"]
    assert not (experiment / "checkpoints").exists() or not any((experiment / "checkpoints").iterdir())
    with pytest.raises(AssertionError, match=r"3 restarts in a row ended without a new step"):
        train_tiny(model, "stopped", initial_checkpoint=start, dataset=data)
