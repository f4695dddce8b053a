from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrainkit.errors import CheckpointError
from pretrainkit.run import checkpoints as resume
from pretrainkit.run import retention
from pretrainkit.run.folder import COMMIT_MARK, checkpoint_name


def save(checkpoints: Path, step: int, *, commit: bool = True) -> Path:
    folder = checkpoints / checkpoint_name(step)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "__0_0.distcp").write_bytes(b"w" * 100)
    (folder / "weights" / ".metadata").write_bytes(b"m" * 10)
    if commit:
        resume.commit(resume.Checkpoint(folder, step=step, consumed_samples=4 * step))
    return folder


def test_a_run_that_never_saved_starts_afresh(tmp_path: Path) -> None:
    assert resume.newest_complete(tmp_path / "checkpoints") is None


def test_takes_the_newest(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        save(tmp_path, step)
    found = resume.newest_complete(tmp_path)
    assert found == resume.Checkpoint(tmp_path / "step_00000100", step=100, consumed_samples=400)


def damage_by_truncation(folder: Path) -> None:
    (folder / "weights" / "__0_0.distcp").write_bytes(b"w" * 99)


def damage_by_loss_of_a_file(folder: Path) -> None:
    (folder / "weights" / ".metadata").unlink()


def damage_of_the_mark(folder: Path) -> None:
    (folder / COMMIT_MARK).write_text('{"step": 10')


@pytest.mark.parametrize(
    "content", [b"", b"12", b"abc", b"999", b"null", b"[]", b"{}", b"\xff\xfe\x00", b'{"step": 10']
)
def test_a_torn_mark_is_passed_over(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 5)
    (save(tmp_path, 10) / COMMIT_MARK).write_bytes(content)
    found = resume.newest_complete(tmp_path)
    assert found is not None and found.step == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 999), ("step", "abc"), ("step", None), ("consumed_samples", "x"), ("file_sizes", {}), ("file_sizes", [])],
)
def test_a_mark_that_cannot_be_of_its_folder_is_passed_over(tmp_path: Path, field: str, value: object) -> None:
    save(tmp_path, 5)
    mark = save(tmp_path, 10) / COMMIT_MARK
    mark.write_text(json.dumps({**json.loads(mark.read_text()), field: value}))
    found = resume.newest_complete(tmp_path)
    assert found is not None and found.step == 5


def lack_of_the_mark(folder: Path) -> None:
    (folder / COMMIT_MARK).unlink()


DAMAGE = [damage_by_truncation, damage_by_loss_of_a_file, damage_of_the_mark, lack_of_the_mark]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_passes_over_an_incomplete_newest(tmp_path: Path, damage: object) -> None:
    save(tmp_path, 5)
    damage(save(tmp_path, 10))  # type: ignore[operator]
    found = resume.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 5


@pytest.mark.parametrize("damage", DAMAGE[:3], ids=lambda damage: damage.__name__)
def test_never_starts_afresh_over_damaged_checkpoints(tmp_path: Path, damage: object) -> None:
    damage(save(tmp_path, 5))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints is complete(.|\n)*What to do"):
        resume.newest_complete(tmp_path)


def test_never_starts_afresh_over_checkpoints_that_were_put_aside(tmp_path: Path) -> None:
    save(tmp_path, 5, commit=False)
    resume.quarantine_incomplete(tmp_path)
    assert resume.newest_complete(tmp_path) is None  # a first save that was cut short
    damage_by_truncation(save(tmp_path, 5))
    resume.quarantine_incomplete(tmp_path)
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints is complete; the newest: step_00000005\.incompl"):
        resume.newest_complete(tmp_path)
    save(tmp_path, 9)
    found = resume.newest_complete(tmp_path)
    assert found is not None and found.step == 9


def test_never_starts_afresh_over_several_checkpoints_without_marks(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step, commit=False)
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is complete"):
        resume.newest_complete(tmp_path)


def test_a_mark_tells_the_data_of_its_attempt(tmp_path: Path) -> None:
    data = {"weights": [], "data_hash": "a"}

    def data_of(folder: Path) -> object:
        return json.loads((folder / COMMIT_MARK).read_text()).get("dataset")

    assert data_of(save(tmp_path, 5)) is None
    saved = save(tmp_path, 10)
    resume.commit(resume.Checkpoint(saved, step=10, consumed_samples=40, dataset=data))
    assert data_of(saved) == {"weights": [], "data_hash": "a"}
    smaller = saved.with_name(saved.name + resume.SMALLER_SUFFIX)
    smaller.mkdir()
    (smaller / "weights").write_bytes(b"w")
    resume.commit(resume.Checkpoint(smaller, step=10, consumed_samples=40, dataset=resume.read(saved).dataset))
    assert data_of(smaller) == {"weights": [], "data_hash": "a"}


def test_a_first_save_that_was_cut_short_starts_afresh(tmp_path: Path) -> None:
    save(tmp_path, 5, commit=False)
    assert resume.newest_complete(tmp_path) is None


def test_says_which_file_is_short(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    damage_by_truncation(folder)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 99 bytes\n  Needed: 100 bytes"):
        resume.read(folder)


def test_quarantine_moves_only_the_incomplete(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10, commit=False)
    moved = resume.quarantine_incomplete(tmp_path)
    assert moved == [tmp_path / "step_00000010.incomplete"]
    save(tmp_path, 10, commit=False)
    assert resume.quarantine_incomplete(tmp_path) == [tmp_path / "step_00000010.incomplete2"]
    assert (tmp_path / "step_00000005").is_dir()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [10, 20, 30, 40, 50]),
        (3, None, [30, 40, 50]),
        (2, 20, [20, 40, 50]),
        (1, None, [40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
    ],
)
def test_retention_keeps_the_newest_and_the_multiples(
    tmp_path: Path, keep_last: int | None, keep_every: int | None, kept: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    for checkpoint in retention.expired(tmp_path, keep_last=keep_last, keep_every=keep_every):
        retention.remove(checkpoint)
    assert sorted(int(path.name.removeprefix("step_")) for path in tmp_path.iterdir()) == kept


def test_incomplete_checkpoints_are_not_counted_as_kept(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    for step in (30, 40):
        save(tmp_path, step, commit=False)
    assert retention.expired(tmp_path, keep_last=2, keep_every=None) == []


def test_a_removal_cut_short_is_finished(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    folder.rename(folder.with_name(folder.name + resume.EXPIRED_SUFFIX))
    assert resume.newest_complete(tmp_path) is None
    retention.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_changed_bytes_of_a_file_of_the_right_size_are_found(tmp_path: Path) -> None:
    saved = resume.read(save(tmp_path, 10))
    assert resume.problem_of(saved) == ""
    with (saved.path / "weights" / "__0_0.distcp").open("r+b") as file:
        file.seek(50)
        file.write(b"x")
    assert resume.read(saved.path) == saved
    assert "weights/__0_0.distcp" in resume.problem_of(saved)


def test_a_mark_without_checksums_is_one_of_an_older_version(tmp_path: Path) -> None:
    saved = resume.read(save(tmp_path, 10))
    mark = json.loads((saved.path / COMMIT_MARK).read_text())
    del mark["checksums"]
    (saved.path / COMMIT_MARK).write_text(json.dumps(mark))
    (saved.path / "weights" / "__0_0.distcp").write_bytes(b"x" * 100)
    assert resume.read(saved.path) == saved and resume.problem_of(saved) == ""


def test_a_damaged_checkpoint_is_passed_over_and_put_aside(tmp_path: Path) -> None:
    older, damaged = save(tmp_path, 5), save(tmp_path, 10)
    problems = {damaged.name: "weights/__0_0.distcp: changed"}
    found = resume.newest_complete(tmp_path, problems)
    assert found is not None and found.path == older
    assert resume.quarantine_incomplete(tmp_path, problems) == [tmp_path / "step_00000010.incomplete"]
    with pytest.raises(CheckpointError, match="none of 2 checkpoints"):
        resume.newest_complete(tmp_path, {older.name: "changed"})
