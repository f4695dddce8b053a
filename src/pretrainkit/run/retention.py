"""Which checkpoints a run keeps, and which of them with their optimizer state.

A checkpoint without optimizer state, for evaluation and release, is a seventh of the size. It is written next to the
complete one, which it then replaces: the state's tensors are removed from the index, files that contain nothing else
are not copied, and files that don't change become hard links. What stays keeps its checksums: damage isn't made good.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.checkpoint import checksums
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.run import evaluations
from pretrainkit.run.checkpoints import (
    EXPIRED_SUFFIX,
    INCOMPLETE_SUFFIX,
    SMALLER_SUFFIX,
    Checkpoint,
    all_complete,
    commit,
    optimizer_layout,
)
from pretrainkit.run.folder import COMMIT_MARK, RunFolder, step_of

MIN_KEPT = 2
"""Complete checkpoints that are never removed: should the newest turn out bad, there is another."""
_OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of the optimizer's tensors."""
_INDEX = ".metadata"
_COPY_BYTES = 1 << 24

log = get_logger(__name__)


def apply_retention(run: ResolvedRun) -> None:
    """Remove expired checkpoints and expired optimizer states. Newer checkpoints exist, so errors are only logged."""
    training, folder = run.config.training, RunFolder.of(run)
    checkpoints = folder.checkpoints
    try:
        doomed = expired(checkpoints, keep_last=training.keep_last, keep_every=training.keep_every)
        awaited = [old for old in doomed if old.path in evaluations.awaited(folder)]
        # At most as many again as are kept: evaluations may be slower than the training.
        awaited = awaited[-max(training.keep_last or 0, MIN_KEPT) :]
        for old in [old for old in doomed if old not in awaited]:
            log.info("removing %s", old.path)
            remove(old)
        for old in expired_states(checkpoints, keep_last=training.keep_optimizer_last):
            log.info("removing the optimizer state of %s", old.path)
            strip_optimizer_state(old)
    except OSError as error:
        log.warning("old checkpoints could not be removed: %s", error)


def expired(checkpoints: Path, *, keep_last: int | None, keep_every: int | None) -> list[Checkpoint]:
    """The complete checkpoints that a run need not keep, oldest first.

    Kept are the newest `keep_last` (at least MIN_KEPT; None: all), and permanently those whose step is a multiple
    of `keep_every`.
    """
    if keep_last is None:
        return []
    old = all_complete(checkpoints)[: -max(keep_last, MIN_KEPT)]
    return [checkpoint for checkpoint in old if not keep_every or checkpoint.step % keep_every]


def expired_states(checkpoints: Path, *, keep_last: int | None) -> list[Checkpoint]:
    """The complete checkpoints that need not keep their optimizer state, oldest first.

    The newest `keep_last` (at least MIN_KEPT; None: all) of those that have it keep it.
    """
    if keep_last is None:
        return []
    having = [checkpoint for checkpoint in all_complete(checkpoints) if optimizer_layout(checkpoint)]
    return having[: -max(keep_last, MIN_KEPT)]


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint, so that a kill in between leaves nothing that looks like one."""
    shutil.rmtree(_renamed(checkpoint))


def strip_optimizer_state(checkpoint: Checkpoint) -> None:
    """Replace a checkpoint by one without optimizer state, with the same weights, step and data position."""
    smaller = checkpoint.path.with_name(checkpoint.path.name + SMALLER_SUFFIX)
    shutil.rmtree(smaller, ignore_errors=True)
    kept = _write_without_optimizer(checkpoint.path, smaller)
    commit(dataclasses.replace(checkpoint, path=smaller, has_optimizer_state=False), kept)
    doomed = _renamed(checkpoint)
    smaller.rename(checkpoint.path)
    files.fsync_path(checkpoint.path.parent)
    shutil.rmtree(doomed)


def _renamed(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.rename(checkpoint.path.with_name(checkpoint.path.name + EXPIRED_SUFFIX))


def _write_without_optimizer(folder: Path, smaller: Path) -> checksums.Checksums:
    """Write the smaller checkpoint but for its commit mark; gives the checksums of what stays."""
    weights = folder / "weights"
    sums = checksums.of_mark(files.read_object(folder / COMMIT_MARK))
    saved = {(part.path, part.begin, part.num_bytes): part.crc32 for part in checksums.parts_of(folder)}
    index: Any = pickle.loads((weights / _INDEX).read_bytes())  # the run's own file, which Megatron unpickles too
    chunks: dict[str, list[Any]] = {}  # those that stay, by file
    changed = {_INDEX}
    for key, place in index.storage_data.items():
        if key.fqn.startswith(_OPTIMIZER_PREFIX):
            changed.add(place.relative_path)
        else:
            chunks.setdefault(place.relative_path, []).append((key, place))

    def left_out(parent: str, names: list[str]) -> set[str]:
        return changed if Path(parent) == weights else {COMMIT_MARK} & set(names)

    shutil.copytree(folder, smaller, copy_function=files.link_or_copy, ignore=left_out)
    for name in changed:
        sums.pop(f"weights/{name}", None)
    for name in changed & chunks.keys():
        moved: dict[int, int] = {}
        with (weights / name).open("rb") as old, (smaller / "weights" / name).open("wb") as new:
            for number, (key, place) in enumerate(chunks[name]):
                chunks[name][number] = (key, dataclasses.replace(place, offset=new.tell()))
                if (crc32 := saved.get((weights / name, place.offset, place.length))) is not None:
                    moved[new.tell()] = crc32
                old.seek(place.offset)
                for left in range(place.length, 0, -_COPY_BYTES):
                    new.write(old.read(min(left, _COPY_BYTES)))
        if len(moved) == sum(place.length > 0 for _, place in chunks[name]):
            sums[f"weights/{name}"] = moved
    kept = dict(itertools.chain.from_iterable(chunks.values()))
    (smaller / "weights" / _INDEX).write_bytes(pickle.dumps(_index_of(index, kept)))
    return sums


def _index_of(index: Any, kept: dict[Any, Any]) -> Any:
    """The index of the remaining chunks, without Megatron's plans of the save, which only a save uses."""

    def without(names: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in names.items() if not name.startswith(_OPTIMIZER_PREFIX)}

    changes = {"state_dict_metadata": without(index.state_dict_metadata), "storage_data": kept}
    for name in ("planner_data", "mcore_data"):
        if isinstance(getattr(index, name, None), dict):
            changes[name] = without(getattr(index, name))
    return dataclasses.replace(index, **changes)


def remove_leftovers(checkpoints: Path) -> None:
    """Finish removals and replacements that a kill interrupted, and remove what killed saves left.

    For the rank that starts a run, while it holds the run's lock: no other process writes there.
    """
    for smaller in checkpoints.glob(f"*{SMALLER_SUFFIX}"):
        replaced = smaller.with_name(smaller.name.removesuffix(SMALLER_SUFFIX))
        if replaced.exists():
            shutil.rmtree(smaller)
        else:
            smaller.rename(replaced)
    for doomed in checkpoints.glob(f"*{EXPIRED_SUFFIX}"):
        shutil.rmtree(doomed)
    complete = all_complete(checkpoints)
    for folder in sorted(checkpoints.glob(f"*{INCOMPLETE_SUFFIX}*")):
        step = step_of(folder.with_name(folder.name.partition(INCOMPLETE_SUFFIX)[0]))
        # One with a commit mark was complete once, and damaged since: that is worth a look.
        if step is not None and complete and step <= complete[-1].step and not (folder / COMMIT_MARK).exists():
            log.info("removing %s, left by a save that was killed", folder)
            shutil.rmtree(folder)
