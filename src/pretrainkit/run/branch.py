"""Branches: an experiment that starts from a checkpoint of another one, with optimizer state and data position.

Its first start links the parent's checkpoint into its own folder: hard links take no space, and the parent may remove
its own. From then on it is an experiment that continues from its own checkpoint. Until then, a plan reads the parent's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pretrainkit import files
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import BranchPoint, ResolvedRun
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.run.checkpoints import Checkpoint, all_complete, newest_committed, read
from pretrainkit.run.folder import RunFolder, checkpoint_name

_WHERE = "--branch_from"


def locate(branch_from: str | None, folder: RunFolder) -> BranchPoint | None:
    """The checkpoint that --branch_from names for the experiment in `folder`; None: it isn't a branch.

    An experiment with checkpoints has begun where its run.json says, whether the flag is given again or not: by then
    the parent may have other checkpoints, or be gone. Raises RequestError for an experiment or a step that isn't there,
    and for a branch point that an experiment with checkpoints doesn't have.
    """
    experiment, step = _parse(branch_from, folder.path.parent) if branch_from else (None, None)
    if newest_committed(folder.checkpoints):
        recorded = _recorded(folder)
        if experiment is None:
            return recorded
        if recorded and Path(recorded.experiment).name == experiment.name and step in (None, recorded.step):
            return recorded
        found = f"a branch of {recorded.experiment} at step {recorded.step}" if recorded else "no branch"
        raise RequestError(
            f"{branch_from}, but this experiment has checkpoints and is {found}",
            needed="a new experiment",
            action="choose another --experiment",
            where=_WHERE,
        )
    if experiment is None:
        return None
    if experiment == folder.path or not RunFolder(experiment).run_file.is_file():
        raise RequestError(
            f"{experiment} is {'this experiment' if experiment == folder.path else 'not an experiment'}",
            needed="the name of another experiment in --experiments_dir or the path of its folder, :STEP behind it",
            where=_WHERE,
        )
    steps = [checkpoint.step for checkpoint in all_complete(RunFolder(experiment).checkpoints)]
    step = steps[-1] if step is None and steps else step
    if step is None or step not in steps:
        raise RequestError(
            f"{experiment} has no complete checkpoint" + ("" if step is None else f" of step {step}"),
            needed=f"one of its steps {', '.join(map(str, steps))}" if steps else "an experiment that has saved",
            where=_WHERE,
        )
    return BranchPoint(str(experiment), step)


def _parse(branch_from: str, experiments_dir: Path) -> tuple[Path, int | None]:
    name, _, step = branch_from.rpartition(":")
    if not name or not step.isdigit():
        name, step = branch_from, ""
    inside = experiments_dir / name
    path = inside if "/" not in name and inside.is_dir() else Path(name).expanduser().resolve()
    return path, int(step) if step else None


def _recorded(folder: RunFolder) -> BranchPoint | None:
    try:
        return read_run(folder.run_file).branch
    except RequestError:  # reported by `pretrainkit.run.identity`
        return None


def parent_checkpoint(branch: BranchPoint, damaged: Mapping[str, str] = MappingProxyType({})) -> Checkpoint:
    """The checkpoint that a branch starts from, in its parent's folder.

    Raises CheckpointError unless it is complete and not `damaged` (`pretrainkit.run.resume_plan.StartPlan.damaged`).
    """
    checkpoint = read(RunFolder(Path(branch.experiment)).checkpoint(branch.step))
    if problem := damaged.get(checkpoint.path.name):
        raise CheckpointError(problem, action="restore it, or branch from another step", where=str(checkpoint.path))
    return checkpoint


def link_checkpoint(run: ResolvedRun) -> None:
    """Give a branch that has no checkpoint yet that of its parent: by hard links, or copied where there are none.

    Raises CheckpointError when the parent's is removed in between.
    """
    folder = RunFolder.of(run)
    if run.branch is None or newest_committed(folder.checkpoints):
        return
    parent = parent_checkpoint(run.branch)
    skipped = RunFolder(Path(run.branch.experiment)).skipped_samples
    if skipped.exists():
        files.write_text(folder.skipped_samples, skipped.read_text(encoding="utf-8"))
    try:
        with files.atomic_folder(folder.checkpoint(run.branch.step)) as temporary:
            shutil.copytree(parent.path, temporary, copy_function=files.link_or_copy, dirs_exist_ok=True)
            if read(parent.path) != parent:
                raise FileNotFoundError(parent.path)  # replaced by one without optimizer state
    except (FileNotFoundError, shutil.Error, CheckpointError):
        raise CheckpointError(
            f"{checkpoint_name(run.branch.step)} was removed or changed while it was being linked",
            action="name a step that --keep_every of the parent keeps",
            where=run.branch.experiment,
        ) from None
