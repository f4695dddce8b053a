"""W&B sees one run, however often it was started, and every step once."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.run.attempts import read_attempts, restarts_without_progress
from pretrainkit.run.folder import RunFolder

pytestmark = pytest.mark.integration


def records_of(path: Path) -> Iterator[Any]:
    """The protobuf records of a .wandb file: a LevelDB log of 32 KiB blocks with headers (crc32, length, type)."""
    from wandb.proto import wandb_internal_pb2

    content, position, record = path.read_bytes(), 7, b""  # 7 bytes: magic and version
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768  # no header fits: padding
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def losses_of(path: Path, field: str = "loss") -> dict[int, float]:
    losses = {}
    for record in records_of(path):
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if field in items:
                losses[record.history.step.num] = items[field]
    return losses


def steps_shown(tensorboard: Path, field: str = "loss") -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(tensorboard)).Reload().Scalars(field)]


@pytest.mark.parametrize("was_killed", [False, True], ids=["ended in order", "killed"])
def test_a_resumed_run_goes_on_under_its_id_and_has_every_step_once(
    make_hf_llama: Callable[..., Path], tmp_path: Path, train_tiny: Callable[..., Any], was_killed: bool
) -> None:
    tiny = make_hf_llama()
    settings = {"save_interval": 2, "wandb_project": "test", "val_interval": 2, "val_steps": 1}
    name = "tracked at $HOME"  # a name, not a variable
    train_tiny(tiny, name, max_steps=3, **settings)
    experiment = tmp_path / name
    run_id = (experiment / "wandb_id.txt").read_text().strip()
    shutil.rmtree(experiment / "checkpoints" / "step_00000003")
    if was_killed:  # before it could tell that all was sent
        (experiment / "wandb_sent_step.txt").unlink()
    metrics = train_tiny(tiny, name, max_steps=5, **settings)
    starts = [record for record in metrics if record.get("event") == "start"]
    assert [(start["step"], start["wandb_run"]) for start in starts] == [(0, None), (2, run_id)]
    files = sorted((experiment / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2 == len(list((experiment / "wandb").glob("offline-run-*")))
    first, second = map(losses_of, files)
    assert (list(first), list(second)) == ([1, 2, 3], [3, 4, 5] if was_killed else [4, 5])
    recorded = {record["step"]: record["loss"] for record in metrics if record.get("loss")}
    assert second == {step: recorded[step] for step in second}
    assert steps_shown(experiment / "tensorboard") == [1, 2, 3, 4, 5]
    assert list(losses_of(files[0], "val_loss")) == [0, 2, 3], "the evaluation before the first step, too"
    assert steps_shown(experiment / "tensorboard", "val_loss") == [0, 2, 4, 5]


def test_a_start_that_ends_with_its_tracker_counts_as_one(
    make_hf_llama: Callable[..., Path], tmp_path: Path, train_tiny: Callable[..., Any]
) -> None:
    for number in range(2):
        with pytest.raises(AssertionError, match="W&B can't be used"):
            train_tiny(make_hf_llama(), "unsent", wandb_project="no/such/name")
        assert restarts_without_progress(read_attempts(RunFolder(tmp_path / "unsent"))) == number
