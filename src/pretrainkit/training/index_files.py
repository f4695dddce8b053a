"""The index files of Megatron's datasets, the order of samples: each appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit import files


def save_arrays_whole() -> None:
    """Let numpy.save write under a temporary name and rename, in this process, from now on.

    megatron-core saves its indexes with it, under their final names, and at the next start takes whatever has these
    names for complete: after a kill, or while another job builds the same, that would be a part of a file.
    """
    plain = np.save
    if plain.__module__ == __name__:
        return

    def save(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            plain(file, *args, **kwargs)
            return
        name = os.fspath(file)
        with (
            files.atomic_file(Path(name if name.endswith(".npy") else f"{name}.npy")) as temporary,
            temporary.open("wb") as out,
        ):
            plain(out, *args, **kwargs)

    np.save = save
