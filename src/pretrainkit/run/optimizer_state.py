"""Copies of checkpoints without optimizer state: a seventh of the size, for evaluation and release.

The state's tensors are removed from the index, and files that contain nothing else are not copied. A file that doesn't
change becomes a hard link. `pretrainkit.run.retention` lets the complete copy replace the checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from pretrainkit.run.checkpoints import SMALLER_SUFFIX, Checkpoint, commit
from pretrainkit.run.folder import COMMIT_MARK

PREFIX = "optimizer."
"""Prefix of the names of the optimizer's tensors."""
_WEIGHTS = "weights"
_INDEX = ".metadata"
_COPY_BYTES = 1 << 24


def write_stripped(checkpoint: Checkpoint) -> Path:
    """Write the smaller checkpoint next to the old one; gives its folder, which has a commit mark."""
    smaller = checkpoint.path.with_name(checkpoint.path.name + SMALLER_SUFFIX)
    shutil.rmtree(smaller, ignore_errors=True)
    _write_without(checkpoint.path, smaller)
    commit(dataclasses.replace(checkpoint, path=smaller, has_optimizer_state=False))
    return smaller


def _write_without(folder: Path, smaller: Path) -> None:
    with (folder / _WEIGHTS / _INDEX).open("rb") as file:
        index: Any = pickle.load(file)  # the run's own file, which Megatron unpickles too
    chunks: dict[str, list[Any]] = {}
    mixed: set[str] = set()
    for key, place in index.storage_data.items():
        chunks.setdefault(place.relative_path, [])
        if key.fqn.startswith(PREFIX):
            mixed.add(place.relative_path)
        else:
            chunks[place.relative_path].append((key, place))
    for path in sorted(folder.rglob("*")):
        target = smaller / path.relative_to(folder)
        name = path.name if path.parent == folder / _WEIGHTS else ""
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif name == _INDEX or path.name == COMMIT_MARK or (name in mixed and not chunks[name]):
            continue
        elif name in mixed:
            _copy_chunks(path, target, chunks[name])
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
    kept = dict(chunk for of_file in chunks.values() for chunk in of_file)
    with (smaller / _WEIGHTS / _INDEX).open("wb") as file:
        pickle.dump(_index_of(index, kept), file)


def _index_of(index: Any, kept: dict[Any, Any]) -> Any:
    """The index of the remaining chunks, without Megatron's plans of the save, which only a save uses."""

    def without(names: dict[str, Any] | None) -> dict[str, Any] | None:
        return names and {name: value for name, value in names.items() if not name.startswith(PREFIX)}

    changes = {"state_dict_metadata": without(index.state_dict_metadata), "storage_data": kept}
    for name in ("planner_data", "mcore_data"):
        if isinstance(getattr(index, name, None), dict):
            changes[name] = without(getattr(index, name))
    return dataclasses.replace(index, **changes)


def _copy_chunks(source: Path, target: Path, chunks: list[Any]) -> None:
    """Copy the remaining chunks to a new file, and update `chunks` with their new offsets."""
    with source.open("rb") as old, target.open("wb") as new:
        for number, (key, place) in enumerate(chunks):
            chunks[number] = (key, dataclasses.replace(place, offset=new.tell()))
            _copy(old, new, place.offset, place.length)


def _copy(old: BinaryIO, new: BinaryIO, offset: int, length: int) -> None:
    old.seek(offset)
    while length > 0:
        block = old.read(min(length, _COPY_BYTES))
        if not block:
            raise EOFError(f"{old.name} ends before byte {offset + length}")
        new.write(block)
        length -= len(block)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
