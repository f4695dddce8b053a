from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrainkit.training.index_files import save_arrays_whole


def test_an_array_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "save", np.save)  # taken back at the end
    save_arrays_whole()
    save_arrays_whole()
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
