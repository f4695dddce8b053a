"""The index files of Megatron's datasets (the order of samples), written atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import DataError

KINDS = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
"""Files that megatron-core caches for a dataset."""
WAIT_S = 120.0
"""A new file is visible to other nodes of a shared disk within a minute (NFS's acdirmax)."""


def saving_atomically(save: Callable[..., None]) -> Callable[..., None]:
    """`numpy.save` that writes under a temporary name and renames.

    megatron-core saves its indexes with it under their final names, and at the next start treats any file of that name
    as complete: after a kill, or while another job builds the same index, it would read part of a file.
    """

    def save_atomically(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *args, **kwargs)
            return
        name = os.fspath(file)
        with (
            files.atomic_file(Path(name if name.endswith(".npy") else f"{name}.npy")) as temporary,
            temporary.open("wb") as out,
        ):
            save(out, *args, **kwargs)

    return save_atomically


def wait_until_seen(folder: Path, name: str, limit_s: float = WAIT_S) -> None:
    """Wait until a dataset's index files `<folder>/<name>-*`, which the first rank has written, are visible here.

    Raises DataError if they aren't in time.
    """
    end = time.monotonic() + limit_s
    while missing := [kind for kind in KINDS if not (folder / f"{name}-{kind}").is_file()]:
        if time.monotonic() > end:
            raise DataError(
                f"{name}-{missing[0]} is not seen here, {limit_s:.0f} s after the first rank wrote it",
                where=str(folder),
                needed="a folder of experiments on a disk that all nodes share",
            )
        time.sleep(0.1)
        if folder.is_dir():
            next(folder.iterdir(), None)  # makes NFS ask its server again
