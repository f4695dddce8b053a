"""Which checkpoint a start continues from, decided from the files alone.

The commit mark of a checkpoint is written last, by rename, and lists every file with its size and checksums; a folder
without a mark, or whose files have other sizes, is not a checkpoint. The checksums take reading all bytes: the ranks
check them before they load a checkpoint (`pretrainkit.engine.intact`), and `problem_of` does elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pretrainkit import files
from pretrainkit.checkpoint import checksums
from pretrainkit.checkpoint.checksums import Checksums
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger
from pretrainkit.run.folder import COMMIT_MARK, checkpoint_name, step_of

START_OVER = "to start over, move the experiment's folder away or choose another --experiment"
"""What can be done where a run is lost."""
SMALLER_SUFFIX = ".smaller"
"""Of a checkpoint that is to replace the one whose name it has (`pretrainkit.run.retention`)."""
EXPIRED_SUFFIX = ".expired"
"""Of a checkpoint that is being removed."""
INCOMPLETE_SUFFIX = ".incomplete"
_STATE = b"optimizer.state."
"""Prefix of the names of the optimizer's tensors."""
_LAYOUTS = {"distributed": _STATE + b"param.", "bf16": _STATE + b"fp32_param."}
"""Names of the fp32 weights that Megatron's optimizers keep; fp32 training without the distributed optimizer keeps
none."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples used so far; the next step reads on from there."""
    global_batch_size: int | None = None
    """Batch size of the attempt that saved it; None in marks of older versions."""
    rampup_batch_size: str | None = None
    """Its batch size warm-up, as --rampup_batch_size has it."""
    optimizer_was_reset: bool = False
    """Whether that attempt was asked to drop the optimizer's moments, and has done so."""
    has_optimizer_state: bool = True
    """False when its optimizer state was stripped; `optimizer_layout` also finds those saved without one."""
    num_bytes: int = field(default=0, compare=False)
    dataset: Mapping[str, Any] | None = field(default=None, compare=False)
    """The fields of `DatasetFacts` that --allow_data_change lets change; None in marks of older versions."""


_MARK_FIELDS = [each.name for each in fields(Checkpoint) if each.name not in ("path", "num_bytes")]


def commit(checkpoint: Checkpoint, known: Checksums | None = None) -> None:
    """Declare a fully written checkpoint complete. One process does this, after all have written.

    `known` are checksums of what was written; a file without one is read for it.
    """
    folder = checkpoint.path
    written = [path for path in folder.rglob("*") if path.is_file() and path.name != COMMIT_MARK]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in written}
    for path in (*written, *{path.parent for path in written}, folder):
        files.fsync_path(path)
    mark = {name: getattr(checkpoint, name) for name in _MARK_FIELDS}
    sums = {name: (known or {}).get(name) or checksums.of_file(folder / name) for name in sizes}
    lists = {"file_sizes": dict(sorted(sizes.items())), checksums.FIELD: checksums.as_json(sums)}
    files.write_json(folder / COMMIT_MARK, {**mark, **lists})


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; CheckpointError says what is missing when it is not complete."""
    mark = folder / COMMIT_MARK
    try:
        content = files.read_json(mark)
        sizes = content["file_sizes"]
        known = {name: content[name] for name in _MARK_FIELDS if name in content}
        checkpoint = Checkpoint(folder, num_bytes=sum(sizes.values()), **known)
        if (summed := checksums.of_mark(content)) and summed.keys() != sizes.keys():
            raise ValueError(f"checksums of {len(summed)} files, sizes of {len(sizes)}")
        if checkpoint_name(checkpoint.step) != folder.name.removesuffix(SMALLER_SUFFIX) or not sizes:
            raise ValueError(f"of step {checkpoint.step}, {len(sizes)} files")
        if not isinstance(checkpoint.consumed_samples, int):
            raise TypeError(f"consumed_samples {checkpoint.consumed_samples!r}")
    except FileNotFoundError:
        raise CheckpointError("not finished: it has no commit mark", where=str(mark)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"unreadable commit mark ({error!r})", where=str(mark)) from None
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:  # also while retention removes it
            found = None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{name} {has}", needed=f"{size} bytes, as written", where=str(folder))
    return checkpoint


def problem_of(checkpoint: Checkpoint) -> str:
    """How the bytes of a complete checkpoint differ from those that were saved; empty if they don't, and for one of an
    older version. It reads them all.
    """
    return checksums.first_problem(checksums.parts_of(checkpoint.path))


def optimizer_layout(checkpoint: Checkpoint) -> str | None:
    """Whose optimizer state a checkpoint holds, which no other optimizer can read: `distributed`, or `bf16` or `fp32`
    training without the distributed optimizer; None: it holds none. Inferred from the tensor names in the index.
    """
    if not checkpoint.has_optimizer_state:
        return None
    index = (checkpoint.path / "weights" / ".metadata").read_bytes()
    if _STATE not in index:
        return None
    return next((layout for layout, name in _LAYOUTS.items() if name in index), "fp32")


def newest_committed(checkpoints: Path) -> Path | None:
    """The newest folder with a commit mark; whether its files are intact is checked by `newest_complete`."""
    return max((path for path in checkpoint_folders(checkpoints) if (path / COMMIT_MARK).is_file()), default=None)


def newest_complete(checkpoints: Path, damaged: Mapping[str, str] = MappingProxyType({})) -> Checkpoint | None:
    """The checkpoint to continue from, or None when the run has not saved yet.

    Incomplete folders newer than it are skipped with a warning, and so are `damaged` ones, each name with what is wrong
    in it. Where checkpoints were complete once, quarantined since or not, and none is now, it raises CheckpointError:
    starting over would silently discard the run.
    """
    problems = []
    for folder in reversed(checkpoint_folders(checkpoints)):
        try:
            found = read(folder)
        except CheckpointError as problem:
            problems.append(problem)
            log.warning("skipping an incomplete checkpoint: %s", problem)
            continue
        if folder.name not in damaged:
            return found
        problems.append(CheckpointError(damaged[folder.name], where=str(folder)))
        log.warning("skipping a damaged checkpoint: %s", problems[-1])
    # One folder without a mark was being written when the run was killed: nothing depended on it yet.
    marked = {mark.parent.name for mark in checkpoints.glob(f"*/{COMMIT_MARK}")}
    lost = {name for name in marked if not name.endswith(EXPIRED_SUFFIX)}
    if lost or len(problems) > 1:
        number = len(lost | {folder.name for folder in checkpoint_folders(checkpoints)})
        raise CheckpointError(
            f"none of {number} checkpoints is complete; the newest: {problems[0] if problems else max(lost)}",
            needed="at least one complete checkpoint to continue from",
            action=f"restore one from a backup; {START_OVER}",
            where=str(checkpoints),
        )
    return None


def all_complete(checkpoints: Path) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; incomplete ones are skipped, a start quarantines them."""
    complete = []
    for folder in checkpoint_folders(checkpoints):
        with contextlib.suppress(CheckpointError):
            complete.append(read(folder))
    return complete


def saved_data(checkpoints: Path) -> dict[str, Any]:
    """Fields of `DatasetFacts` in the newest commit mark: the data it was trained on. Marks of older versions have
    none."""
    newest = newest_committed(checkpoints)
    return files.read_object(newest / COMMIT_MARK).get("dataset") or {} if newest else {}


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """The folders of all checkpoints, complete or not, oldest first."""
    return sorted(path for path in checkpoints.glob("*") if path.is_dir() and step_of(path) is not None)


def quarantine_incomplete(checkpoints: Path, damaged: Collection[str] = ()) -> list[Path]:
    """Rename incomplete checkpoints, so that they are not loaded nor in the way of new ones; gives the new paths.

    `damaged` are names of others that are renamed, too.
    """
    moved = []
    for folder in checkpoint_folders(checkpoints):
        try:
            is_complete = bool(read(folder))
        except CheckpointError:
            is_complete = False
        if not is_complete or folder.name in damaged:
            target, number = folder.with_name(folder.name + INCOMPLETE_SUFFIX), 1
            while target.exists():
                number += 1
                target = folder.with_name(f"{folder.name}{INCOMPLETE_SUFFIX}{number}")
            moved.append(folder.rename(target))
    return moved
