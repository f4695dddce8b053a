"""Checkpoints that are written in the background are those that training would have waited for, and none is lost
without a word: a save that fails is tried again, missed where that is allowed, or the end of the run.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import save_faults
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

from pretrainkit.checkpoint.formats.hf_files import is_weight_file
from pretrainkit.checkpoint.formats.nemo import TOKENIZER_FOLDER
from pretrainkit.engine import nemo
from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
from pretrainkit.run import checkpoints
from pretrainkit.run.attempts import read_attempts
from pretrainkit.run.folder import COMMIT_MARK, RunFolder, checkpoint_name
from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
DEADLINE_S = 120


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


@pytest.fixture
def train_faulty(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]
) -> Callable[..., tuple[int, str, list[dict[str, Any]]]]:
    """Train with faults: the first rank's exit code, its log, and the records; `times` is how often they come."""

    def train(*, faults: dict[str, Any], times: int = 1, **settings: Any) -> tuple[int, str, list[dict[str, Any]]]:
        run_file = write_tiny_run(tiny, "faulty", **settings)
        tokens = tmp_path / "times"
        tokens.mkdir(exist_ok=True)
        for number in range(times):
            (tokens / str(number)).touch()
        world_size = settings.get("data_parallel", 1)
        logs = [run_file.parent / f"rank{rank}.log" for rank in range(world_size)]
        processes = ranks.start_ranks(
            save_faults.train_with_faults, world_size, logs, run_file=run_file, times=tokens, **faults
        )
        for process in processes:
            process.join(DEADLINE_S)
            assert process.exitcode is not None, logs[0].read_text()[-3000:]
        assert len({process.exitcode for process in processes}) == 1, logs[-1].read_text()[-3000:]
        return processes[0].exitcode, logs[0].read_text(), read_records(run_file.parent / "metrics.jsonl")

    return train


def steps_saved(experiment: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.all_complete(experiment / "checkpoints")]


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize("data_parallel", [1, 2], ids=["one rank", "DP=2"])
def test_a_save_in_the_background_holds_the_step_it_began_at(
    tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any], write_tiny_run: Callable[..., Path], data_parallel: int
) -> None:
    unbroken = losses(train_tiny(tiny, "unbroken", max_steps=12, data_parallel=data_parallel))
    settings = {"data_parallel": data_parallel, "save_interval": 3, "async_save": "on"}
    run_file = write_tiny_run(tiny, "background", max_steps=10**6, **settings)
    folder = run_file.parent / "checkpoints" / "step_00000003"
    logs = [run_file.parent / f"rank{rank}.log" for rank in range(data_parallel)]
    processes = ranks.start_ranks(save_faults.train_with_faults, data_parallel, logs, run_file=run_file, delay_s=1.5)
    seen = []
    while not (folder / COMMIT_MARK).exists():
        assert all(process.is_alive() for process in processes), logs[0].read_text()[-3000:]
        if (folder / "weights" / "common.pt").exists() and (found := read_attempts(RunFolder(run_file.parent))):
            seen.append(found[-1].last_step)
        time.sleep(0.02)
    assert (folder / "weights" / ".metadata").exists()
    ranks.kill_with_children(processes)
    # Training went on while files were written: step 4 and 5, until step 6 was to be saved.
    assert max(seen) >= 5 and "training waits for it" in logs[0].read_text()
    assert checkpoints.read(folder).step == 3 and checkpoints.read(folder).consumed_samples == 12
    resumed = losses(train_tiny(tiny, "background", max_steps=12, **settings))
    assert resumed == unbroken


def test_a_checkpoint_holds_the_tokenizer_but_not_the_models_own_weights(
    tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any]
) -> None:
    assert list(tiny.glob("*.safetensors"))
    train_tiny(tiny, "small", max_steps=1)
    folder = tmp_path / "small" / "checkpoints" / checkpoint_name(1)
    context = folder / "context"
    assert not [path for path in context.rglob("*") if is_weight_file(path)]
    tokenizer = nemo.lightning.io.load_context(folder, "model.tokenizer")
    assert Path(tokenizer.tokenizer.name_or_path) == context / TOKENIZER_FOLDER
    assert tokenizer.text_to_ids("a text") == AutoTokenizer(str(tiny)).text_to_ids("a text")


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shard": ("on", {"where": save_faults.SHARDS}),
    "shard of another rank": ("on", {"where": save_faults.SHARDS, "faulty_rank": 1}),
    "shard of another rank, waiting": ("off", {"where": save_faults.SHARDS, "faulty_rank": 1}),
    "common.pt": ("on", {"where": save_faults.COMMON}),
    "index": ("on", {"where": save_faults.INDEX}),
    "context, waiting": ("off", {"where": save_faults.CONTEXT}),
}


@pytest.mark.parametrize(("async_save", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_a_passing_error_costs_no_checkpoint(
    tmp_path: Path, train_faulty: Any, fault: dict[str, Any], async_save: str
) -> None:
    settings = {"data_parallel": 2, "max_steps": 4, "save_interval": 2, "async_save": async_save}
    code, log, records = train_faulty(faults={"number": errno.EIO, **fault}, **settings)
    assert code == 0 and "a save failed (EIO (Input/output error)" in log, log[-3000:]
    saved = steps_saved(tmp_path / "faulty")
    # In the background the failure is seen a step later, and that step is saved in place of the lost one.
    assert saved[-1] == 4 and saved[0] in ((2,) if async_save == "off" else (2, 3, 4))
    assert [record["step"] for record in records if record.get("event") == "checkpoint"] == saved


@pytest.mark.parametrize(
    ("where", "async_save", "max_missed_saves"),
    [
        (save_faults.SHARDS, "off", 0),
        (save_faults.SHARDS, "on", 0),
        (save_faults.SHARDS, "on", 1),
        (save_faults.CONTEXT, "off", 0),
        (save_faults.CONTEXT, "on", 1),
    ],
)
def test_a_full_disk_ends_the_run_or_is_missed_once(
    tmp_path: Path, train_faulty: Any, where: str, max_missed_saves: int, async_save: str
) -> None:
    code, log, records = train_faulty(
        faults={"where": where, "number": errno.ENOSPC, "folder": checkpoint_name(4)},
        max_steps=10,
        save_interval=2,
        async_save=async_save,
        max_missed_saves=max_missed_saves,
    )
    saved = steps_saved(tmp_path / "faulty")
    assert [record["step"] for record in records if record.get("event") == "missed_save"] == [4]
    assert not (tmp_path / "faulty" / "checkpoints" / checkpoint_name(4)).exists()
    if max_missed_saves:
        assert code == 0 and saved == [2, 6, 8, 10] and log.count("STEP 4 IS NOT SAVED") == 1
    else:
        assert code == 1 and saved == [2]
        assert "ENOSPC" in log and "free disk space" in log and f"{checkpoint_name(2)}" in log


@pytest.mark.parametrize(
    ("where", "save_timeout"),
    [(save_faults.KILLED, "01:00:00"), (save_faults.LOST, "01:00:00"), (save_faults.STUCK, "00:02")],
)
def test_a_writer_that_dies_or_hangs_is_noticed(
    tmp_path: Path, train_faulty: Any, where: str, save_timeout: str
) -> None:
    code, log, _ = train_faulty(
        faults={"where": where},
        max_steps=4,
        save_interval=2,
        async_save="on",
        save_timeout=save_timeout,
    )
    assert code == 0 and "a save failed" in log, log[-3000:]
    assert where != save_faults.LOST or "was killed by SIGKILL" in log
    assert steps_saved(tmp_path / "faulty")[-1] == 4


def test_a_writer_that_dies_on_another_rank_is_noticed(tmp_path: Path, train_faulty: Any) -> None:
    code, log, _ = train_faulty(
        faults={"where": save_faults.LOST, "faulty_rank": 1},
        max_steps=4,
        save_interval=2,
        async_save="on",
        data_parallel=2,
    )
    assert code == 0, log[-3000:]
    assert any("a save failed" in line and "was killed by SIGKILL" in line for line in log.splitlines()), log[-3000:]
    assert steps_saved(tmp_path / "faulty")[-1] == 4


def test_a_save_that_something_else_has_waited_for_is_done(tmp_path: Path, train_faulty: Any) -> None:
    code, log, _ = train_faulty(faults={"where": save_faults.FINALISED}, max_steps=6, save_interval=3, async_save="on")
    assert code == 0 and "a save failed" not in log, log[-3000:]
    assert steps_saved(tmp_path / "faulty") == [3, 6]


def test_a_checkpoint_has_the_entries_that_transformer_engines_layers_have(
    tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any]
) -> None:
    """Megatron's loader wants all that a layer declares, and passes over what it doesn't."""
    from torch.distributed.checkpoint import FileSystemReader

    train_tiny(tiny, "saved", max_steps=1)
    weights = tmp_path / "saved" / "checkpoints" / checkpoint_name(1) / "weights"
    keys = FileSystemReader(str(weights)).read_metadata().state_dict_metadata
    states = {key.partition("/")[0] for key in keys if "_extra_state" in key}
    modules = ["final_layernorm", *(f"layers.self_attention.linear_{name}" for name in ("qkv", "proj"))]
    modules += [f"layers.mlp.linear_{name}" for name in ("fc1", "fc2")]
    assert states == {f"module.decoder.{name}._extra_state" for name in modules}


def test_the_last_save_is_never_missed(tmp_path: Path, train_faulty: Any) -> None:
    faults = {"number": errno.ENOSPC, "folder": checkpoint_name(4)}
    code, log, _ = train_faulty(faults=faults, max_steps=4, save_interval=2, async_save="on", max_missed_saves=9)
    assert code == 1 and "step 4 could not be saved" in log
    assert steps_saved(tmp_path / "faulty") == [2]


def test_a_signal_during_a_save_waits_for_it(tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]) -> None:
    run_file = write_tiny_run(tiny, "stopped", max_steps=10**6, save_interval=5, async_save="on")
    log = run_file.parent / "rank0.log"
    (process,) = ranks.start_ranks(save_faults.train_with_faults, 1, [log], run_file=run_file, delay_s=1.0)
    being_written = run_file.parent / "checkpoints" / "step_00000005" / "weights" / "common.pt"
    end = time.monotonic() + DEADLINE_S
    while not being_written.exists():
        assert process.is_alive() and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(DEADLINE_S)
    assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
    last = read_attempts(RunFolder(run_file.parent))[-1].last_step
    assert steps_saved(run_file.parent) == sorted({5, last}) and last <= 7


@pytest.mark.parametrize("settings", [{"pipeline": 2}, {"precision": "bf16"}], ids=["PP=2", "bf16"])
def test_the_sizes_of_what_a_save_copies_are_known_before_it(
    tiny: Path, write_tiny_run: Callable[..., Path], settings: dict[str, Any]
) -> None:
    run_file = write_tiny_run(tiny, "copies", max_steps=2, save_interval=2, **settings)
    ranks.run_ranks(ranks.train_rank_noting_copies, settings.get("pipeline", 1), run_file.parent, run_file=run_file)
    for path in run_file.parent.glob("copies*.json"):
        sizes = json.loads(path.read_text())
        assert sizes["expected"] == sizes["copied"] != []
