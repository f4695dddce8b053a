"""Old checkpoints without their optimizer state: a seventh of the size, for evaluation and release.

The state's tensors are left out of the index, and files that hold nothing else are left out whole. The smaller
checkpoint is made beside the old one, of hard links where a file stays as it is, and takes its name when it is
complete; a kill in between leaves one or the other, and `resume.remove_leftovers` tidies up.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from pretrainkit.run import checkpoints as resume

PREFIX = "optimizer."
"""Names of the optimizer's tensors begin with it."""
_WEIGHTS = "weights"
_INDEX = ".metadata"
_COPY_BYTES = 1 << 24


def expired(checkpoints: Path, *, keep_last: int | None) -> list[resume.Checkpoint]:
    """The complete checkpoints that need not keep their optimizer state, oldest first.

    The newest `keep_last` (at least resume.MIN_KEPT; None: all) of those that have it keep it.
    """
    if keep_last is None:
        return []
    having = [checkpoint for checkpoint in resume.all_complete(checkpoints) if resume.has_optimizer_state(checkpoint)]
    return having[: -max(keep_last, resume.MIN_KEPT)]


def leave_out(checkpoint: resume.Checkpoint) -> None:
    """Replace a checkpoint by one without the optimizer's state, with the same weights, step and data position."""
    folder = checkpoint.path
    smaller = folder.with_name(folder.name + resume.SMALLER_SUFFIX)
    shutil.rmtree(smaller, ignore_errors=True)
    _write_without(folder, smaller)
    resume.commit(
        smaller,
        step=checkpoint.step,
        consumed_samples=checkpoint.consumed_samples,
        global_batch_size=checkpoint.global_batch_size,
        optimizer_was_reset=checkpoint.optimizer_was_reset,
        has_optimizer_state=False,
        data=checkpoint.data,
    )
    resume.replace(checkpoint, smaller)


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
        elif name == _INDEX or path.name == resume.COMMIT_MARK or (name in mixed and not chunks[name]):
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
    """The index of the chunks that stay. Megatron's plans of the save, of use to a save alone, are left out."""

    def without(names: dict[str, Any] | None) -> dict[str, Any] | None:
        return names and {name: value for name, value in names.items() if not name.startswith(PREFIX)}

    changes = {"state_dict_metadata": without(index.state_dict_metadata), "storage_data": kept}
    for name in ("planner_data", "mcore_data"):
        if isinstance(getattr(index, name, None), dict):
            changes[name] = without(getattr(index, name))
    return dataclasses.replace(index, **changes)


def _copy_chunks(source: Path, target: Path, chunks: list[Any]) -> None:
    """Copy the chunks that stay to a file of their own, and let `chunks` name their new places."""
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
