"""Old checkpoints lose their optimizer state whole or not at all, and the newest never do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pretrainkit.data.indexed.file_bytes import checksum
from pretrainkit.errors import CheckpointError
from pretrainkit.run import checkpoints as resume
from pretrainkit.run import retention
from pretrainkit.run.folder import checkpoint_name
from pretrainkit.run.resume_plan import plan_start

WEIGHT = torch.arange(6.0).view(2, 3)


def save(checkpoints: Path, step: int, *, name: str = "") -> Path:
    """A checkpoint with a weight and a moment in one file, by torch's own writer."""
    folder = checkpoints / checkpoint_name(step)
    state = {"module.weight": WEIGHT + step, "optimizer.state.exp_avg.module.weight": torch.ones(1000)}
    dcp.save(state, checkpoint_id=folder / "weights", no_dist=True)
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text("model")
    resume.commit(resume.Checkpoint(folder, step=step, consumed_samples=4 * step, global_batch_size=4))
    return folder


def load(folder: Path) -> torch.Tensor:
    state = {"module.weight": torch.zeros(2, 3)}
    dcp.load(state, checkpoint_id=folder / "weights", no_dist=True)
    return state["module.weight"]


@pytest.mark.parametrize(("keep_last", "without"), [(None, []), (1, [1, 2, 3]), (3, [1, 2]), (9, [])])
def test_the_newest_keep_it_at_least_two(tmp_path: Path, keep_last: int | None, without: list[int]) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    assert [old.step for old in retention.expired_states(tmp_path, keep_last=keep_last)] == without


def test_weights_and_all_else_stay_and_the_moments_go(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    before = resume.read(folder)
    retention.strip_optimizer_state(before)
    after = resume.read(folder)
    assert after.num_bytes < before.num_bytes - 4000 and resume.optimizer_layout(after) is None
    assert (after.step, after.consumed_samples, after.global_batch_size) == (3, 12, 4)
    assert torch.equal(load(folder), WEIGHT + 3)
    assert (folder / "context" / "model.yaml").read_text() == "model"
    index = pickle.loads((folder / "weights" / ".metadata").read_bytes())
    assert list(index.state_dict_metadata) == ["module.weight"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003"]
    assert retention.expired_states(tmp_path, keep_last=1) == []


@pytest.mark.parametrize("moment", ["writing", "commit", "first rename", "second rename", "removal"])
def test_a_kill_in_between_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 3)

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    calls = iter(range(9))
    rename = Path.rename
    with monkeypatch.context() as patch:
        if moment == "writing":
            patch.setattr(retention, "_index_of", kill)
        elif moment == "commit":
            patch.setattr(retention, "commit", kill)
        elif moment == "removal":
            patch.setattr(retention.shutil, "rmtree", lambda path, **_: kill() if path.exists() else None)
        else:
            last = moment == "second rename"
            patch.setattr(Path, "rename", lambda self, to: kill() if next(calls) == last else rename(self, to))
        with pytest.raises(Killed):
            retention.strip_optimizer_state(resume.read(folder))
    retention.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    assert torch.equal(load(folder), WEIGHT + 3) and resume.read(folder).step == 3


def test_a_start_says_that_there_is_none(tmp_path: Path, make_run: Callable[..., object]) -> None:
    folder = save(tmp_path / "checkpoints", 3)
    retention.strip_optimizer_state(resume.read(folder))
    with pytest.raises(CheckpointError, match="it has no optimizer state"):
        plan_start(make_run())  # type: ignore[arg-type]
    plan = plan_start(make_run(reset_optimizer=True))  # type: ignore[arg-type]
    assert (plan.step, plan.optimizer_state) == (3, "reset")


def test_what_killed_saves_left_goes_once_a_later_one_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("step_00000002.incomplete", "step_00000004.incomplete", "step_00000004.incomplete2"):
        (tmp_path / name / "weights").mkdir(parents=True)
    ahead = tmp_path / "step_00000006.incomplete"
    ahead.mkdir()
    retention.remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "nothing is complete yet"
    damaged = save(tmp_path, 3).rename(tmp_path / "step_00000003.incomplete")
    complete = save(tmp_path, 4)
    with caplog.at_level("INFO", logger="pretrainkit"):
        retention.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [damaged, complete, ahead]
    assert caplog.text.count("left by a save that was killed") == 3


def test_what_stays_keeps_its_checksums(tmp_path: Path) -> None:
    """Damage that happened before isn't blessed by a new sum."""
    folder = save(tmp_path, 3)
    (shard,) = (folder / "weights").glob("*.distcp")
    index = pickle.loads((folder / "weights" / ".metadata").read_bytes())
    places = {key.fqn: place for key, place in index.storage_data.items()}
    parts = {place.offset: checksum(shard, place.offset, place.length) for place in places.values()}
    saved = resume.read(folder)
    resume.commit(saved, {f"weights/{shard.name}": parts})  # as Megatron's writers sum it
    with shard.open("r+b") as file:
        weight = places["module.weight"]
        file.seek(weight.offset + weight.length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert shard.name in resume.problem_of(saved)
    retention.strip_optimizer_state(saved)
    assert shard.name in resume.problem_of(resume.read(folder))
