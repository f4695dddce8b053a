"""A batch that gives NaN changes no weight: the run stops, or leaves it out on every rank alike.

The model's embedding of a token that text never holds is infinite; documents with that token are the bad ones.
"""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from indexed_writer import IndexedDatasetWriter

from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
BAD_TOKEN = 2
BAD_DOCUMENTS = {25, 34}
"""Of those that `words` makes up: in the order of samples they lie in steps 2 and 7, which is 6 without the other's."""
REPOSITORY = Path(__file__).parents[2]
pretrain = runpy.run_path(str(REPOSITORY / "pretraining" / "pretrain.py"))["main"]
inspect_run = runpy.run_path(str(REPOSITORY / "tools" / "inspect_run.py"))["main"]


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


@pytest.fixture
def words(model: Path, start: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a run on two ranks, on made-up documents, two of them bad; more flags follow."""
    random, data = np.random.RandomState(0), tmp_path / "some"
    with IndexedDatasetWriter(data, np.dtype(np.uint16)) as writer:
        for number in range(100):
            ids = random.randint(3, 120, 200)
            ids[0] = BAD_TOKEN if number in BAD_DOCUMENTS else ids[0]
            writer.add_document(ids)

    def flags(experiment: str, max_steps: int, *more: object) -> list[str]:
        given = ["--hf_model_id", model, "--nemo_model", start, "--dataset_path", data, "--sequence_length", 128]
        given += ["--split", "8,1,1", "--accelerator", "cpu", "--num_gpus", 2, "--global_batch_size", 4, "--lr", 1e-3]
        given += ["--num_workers", 0, "--val_interval", 0, "--start_parity", "off", "--save_interval", 2]
        given += ["--lr_warmup_steps", 1, "--lr_decay_steps", 20, "--experiments_dir", tmp_path]
        return [*map(str, [*given, "--experiment", experiment, "--max_steps", max_steps, *more])]

    return flags


def resolved(words: list[str]) -> Path:
    """The run.json of a command, as its ranks get it."""
    assert pretrain([*words, "--dry_run"]) == 0
    run_file = Path(words[words.index("--experiments_dir") + 1], words[words.index("--experiment") + 1], "run.json")
    if (dry := run_file.with_name("dry_run.json")).exists():
        dry.replace(run_file)
    return run_file


def trained(target: Callable[..., None], words: list[str], **arguments: Any) -> list[dict[str, Any]]:
    run_file = resolved(words)
    ranks.run_ranks(target, 2, run_file.parent, run_file=run_file, **arguments)
    return read_records(run_file.with_name("metrics.jsonl"))


def test_a_run_with_rollbacks_is_a_run_whose_data_never_had_the_bad_samples(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_step(records: list[dict[str, Any]]) -> dict[int, tuple[float, ...]]:
        """A step that was done again counts as it was then."""
        names = ("loss", "grad_norm", "learning_rate", "tokens")
        return {each["step"]: tuple(each[name] for name in names) for each in records if "loss" in each}

    command = words("bad", 8, "--on_bad_loss", "rollback")
    trained(ranks.train_rank_until_rollback, command)
    with pytest.raises(AssertionError, match=r"step 6: the loss is nan, after 1 rollbacks \(--max_rollbacks\)"):
        trained(ranks.train_rank_until_rollback, [*command, "--max_rollbacks", "1"])
    for _ in range(2):
        records = trained(ranks.train_rank_until_rollback, command)
    events = [each for each in records if each.get("event") in ("start", "rollback")]
    assert [(each["event"], each["step"]) for each in events] == [
        *(("start", 0), ("rollback", 1), ("start", 0), ("start", 4), ("rollback", 5), ("start", 4))
    ]
    skipped = events[-1]["skipped"]
    left_out = [sample for first, last in skipped["ranges"] for sample in range(first, last + 1)]
    assert len(left_out) == 8 and skipped["num_rollbacks"] == 2
    expected = trained(ranks.train_rank_without_samples, words("good", 8), left_out=left_out)
    assert by_step(records) == by_step(expected) and len(by_step(expected)) == 8
    assert not [each for each in expected if each.get("event") == "bad_loss"]
    capsys.readouterr()
    assert inspect_run([str(tmp_path / "bad")]) == 0
    assert "rollbacks  after steps 1, 5" in capsys.readouterr().out


def test_after_a_rollback_the_same_command_trains_on(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """All ranks replace their processes, and meet again through a store of their own."""
    command = [
        sys.executable,
        REPOSITORY / "pretraining" / "pretrain.py",
        *words("bad", 2, "--on_bad_loss", "rollback"),
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "step 2: the loss is nan; going back to the last checkpoint, without its samples" in done.stderr
    records = read_records(tmp_path / "bad" / "metrics.jsonl")
    assert [each["step"] for each in records if each.get("event") == "start"] == [0, 0]
    assert [each["step"] for each in records if each.get("event") == "checkpoint"] == [2]
    assert len(list((tmp_path / "bad" / "logs").glob("attempt_*"))) == 1
