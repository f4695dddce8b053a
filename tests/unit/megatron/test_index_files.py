from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from pretrainkit.errors import DataError
from pretrainkit.megatron import patches
from pretrainkit.megatron.dataset import INDEX_KINDS, remove_damaged_indexes, wait_until_seen


def test_an_array_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "save", np.save)  # taken back at the end
    patches.apply(patches.INDEX_FILES)
    patches.apply(patches.INDEX_FILES)
    np.save(tmp_path / "a", np.arange(5))
    np.save(str(tmp_path / "b.npy"), np.arange(5), allow_pickle=True)

    class Killed:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        np.save(tmp_path / "c.npy", Killed())
    with (tmp_path / "d.npy").open("wb") as file:
        np.save(file, np.arange(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "b.npy", "d.npy"]
    assert all(np.load(path).tolist() == [0, 1, 2, 3, 4] for path in tmp_path.iterdir())


def test_other_ranks_wait_for_files_that_their_disk_shows_late(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def write() -> None:
        folder.mkdir()
        for kind in INDEX_KINDS:
            (folder / f"x-{kind}").touch()

    timer = threading.Timer(0.3, write)
    timer.start()
    wait_until_seen(folder, "x", limit_s=60)
    timer.join()
    with pytest.raises(DataError, match=r"y-description\.txt is not seen here"):
        wait_until_seen(folder, "y", limit_s=0.2)


def test_cut_index_files_are_removed_and_no_others(tmp_path: Path) -> None:
    names = [
        f"{name}-{kind}_index.npy" for name in ("x", "y", "z-BlendedDataset-train") for kind in ("sample", "shuffle")
    ]
    for name in names:
        np.save(tmp_path / name, np.arange(50))
    for name in (names[0], names[2], names[4]):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    (tmp_path / names[1]).write_bytes(b"")
    remove_damaged_indexes(tmp_path, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[2], names[3], names[5]])
    remove_damaged_indexes(tmp_path / "nowhere", "x")
