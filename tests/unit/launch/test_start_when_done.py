"""A start of a run whose steps are all done starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.load import load_config
from pretrainkit.launch.start import print_plan, resolve_request, start
from pretrainkit.run import checkpoints
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.identity import write_run_file


@pytest.mark.parametrize(
    ("max_steps", "words"), [(20, "20 of 20 done"), (12, "20 done, more than --max_steps 12")], ids=["equal", "fewer"]
)
@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_a_start_after_the_end_leaves_the_experiment_as_it_is(
    tmp_path: Path,
    hf_folder: Path,
    dataset_folder: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    executor: str,
    max_steps: int,
    words: str,
) -> None:
    flags: dict[str, Any] = {
        "hf_model_id": str(hf_folder),
        "data.dataset_path": str(dataset_folder),
        "data.sequence_length": 128,
        "training.global_batch_size": 8,
        "training.max_steps": 20,
        "launch.accelerator": "cpu",
        "experiments_dir": str(tmp_path),
        "experiment": "done",
    }
    run = resolve_request(load_config(flags=flags))
    write_run_file(run)
    folder = RunFolder.of(run).checkpoint(20)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / ".metadata").write_bytes(b"optimizer.state.param.")
    checkpoints.commit(checkpoints.Checkpoint(folder, step=20, consumed_samples=160, global_batch_size=8))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    config = load_config(flags={**flags, "training.max_steps": max_steps, "launch.executor": executor})
    with caplog.at_level("INFO", logger="pretrainkit"):
        assert start(config, train_script=tmp_path / "train.py", command_line=["pretrain.py"]) == 0
    assert f"nothing to do: {words}" in caplog.text
    print_plan(config, as_json=False)
    assert f"step       {words}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
