"""Which run an experiment is: what may not change once it has checkpoints, and how a start records what it changes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE
from pretrainkit.config.batch_size import samples_after
from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import BlendChange, BranchPoint, DatasetFacts, ResolvedRun
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.files import same_fingerprint
from pretrainkit.logs import get_logger
from pretrainkit.records import decode, leaves
from pretrainkit.run.branch import parent_checkpoint
from pretrainkit.run.checkpoints import Checkpoint, newest_complete, saved_data
from pretrainkit.run.folder import RUN_FILE, RunFolder
from pretrainkit.run.lr_schedule import learning_rate

IDENTITY = (
    "model",
    "config.nemo_model",
    "config.data.sequence_length",
    "config.data.split",
    "config.training.seed",
    "dataset.weights",
    "dataset.data_hash",
    "dataset.schedule",
)
"""Fields of run.json that define a run: weights, data, and the order in which the data is read."""
DATA = ("dataset.weights", "dataset.data_hash", "dataset.schedule")
"""Those of them that --allow_data_change lets change."""
RATE_TOLERANCE = 0.01
"""Relative change of the learning rate at a resume that is worth a warning; assumed."""
_NOT_COMPARED = (
    "config.experiments_dir",
    "experiment_dir",
    "initial_weights",
    "config.branch_from",
    "branch",
    "validation_sets",
    "dataset.prefixes",
    "dataset.part_names",
    "dataset.label_bytes_per_token",
    "start_mode",
    "kernels",
    "recompute",
    "gpu_name",
    "gpu_memory_gib",
    "estimates",
)
"""Fields that are paths, since a moved experiment, model or dataset is the same one, or that follow from others or from
the machine that trains."""

Changes = dict[str, tuple[Any, Any]]
"""Dotted name of a field of run.json -> (old value, new value)."""

log = get_logger(__name__)


def changes(before: ResolvedRun, now: ResolvedRun) -> Changes:
    """Fields that differ between two runs, apart from paths; --nemo_model differs where the weights do."""
    old, new = (
        {name: _as_lists(item) for name, item in leaves(dataclasses.asdict(run), without=_NOT_COMPARED)}
        for run in (before, now)
    )
    changed = {name: (old.get(name), new.get(name)) for name in old | new if old.get(name) != new.get(name)}
    if "dataset.weights" in changed and _same_blend(*changed["dataset.weights"]):
        del changed["dataset.weights"]
    if same_fingerprint(before.dataset.data_hash, now.dataset.data_hash):
        changed.pop("dataset.data_hash", None)
    changed.pop("config.nemo_model", None)
    return changed | _changed_weights(before, now)


def write_run_file(run: ResolvedRun, *, is_dry: bool = False) -> Path:
    """Write run.json after checking that the experiment may resume as `run`; gives its path.

    Once it has checkpoints, its identity is fixed: the same command continues it, and another model, dataset,
    sequence length, split or seed needs another experiment. Other changes are logged. Before the first
    checkpoint anything may change.

    Raises RequestError that names every changed field with both values.
    """
    folder = RunFolder.of(run)
    path = folder.dry_run_file if is_dry and folder.has_started else folder.run_file
    since = "from the parent" if _is_new_branch(run) else "since the last start"
    for name, (old, new) in changes_since_last_start(run).items():
        log.info("changed %s: %s: %s -> %s", since, name, old, new)
    write_run(path, run)
    return path


def changes_since_last_start(run: ResolvedRun) -> Changes:
    """Fields of run.json that a start would change; empty before the first start, of a branch those of its parent.

    Warns when the learning rate jumps though no option of the schedule changed. Raises RequestError as `write_run_file`
    does.
    """
    folder = RunFolder.of(run)
    if run.branch and _is_new_branch(run):
        return _changes_from_parent(run, run.branch)
    if not any(folder.checkpoints.glob("*")):
        try:  # before the first start, run.json is a dry run's
            return changes(read_run(folder.run_file), run) if folder.has_started else {}
        except RequestError:  # nothing depends on it: it is replaced
            return {}
    if not folder.run_file.exists():
        raise RequestError(
            "there are checkpoints, but no run.json that describes their run",
            action=_how_to_restore(folder),
            where=str(folder.path),
        )
    before = read_run(folder.run_file)
    # run.json describes the last start, which may have had other data and ended before its first save.
    data = saved_data(folder.checkpoints)
    saved = dataclasses.replace(before, dataset=dataclasses.replace(before.dataset, **data))
    _check_identity(folder, changes(saved, run), allowed=DATA if run.config.data.allow_data_change else ())
    changed = changes(before, run)
    if newest := newest_complete(folder.checkpoints):
        _check_tokenizer(run, newest)
        _check_past_blend(saved, run, newest)
        _warn_of_rate_jump(before, run, changed, newest.step)
    return changed


def _check_tokenizer(run: ResolvedRun, checkpoint: Checkpoint) -> None:
    """Raise RequestError if the run has another tokenizer than the checkpoint it starts from."""
    source = checkpoint.path / HF_SOURCE
    if source.is_dir() and load_tokenizer(source).sha256 != load_tokenizer(Path(run.hf_folder)).sha256:
        raise RequestError(
            f"another tokenizer than that of {checkpoint.path}",
            needed="the model and tokenizer that it was trained with",
            action=f"take their --hf_model_id; {source} has the files",
            where="--hf_model_id",
        )


def _is_new_branch(run: ResolvedRun) -> bool:
    return run.branch is not None and not any(RunFolder.of(run).checkpoints.glob("*"))


def _changes_from_parent(run: ResolvedRun, branch: BranchPoint) -> Changes:
    """Fields in which a branch differs from its parent. Raises RequestError where they make it another run."""
    folder, checkpoint = RunFolder(Path(branch.experiment)), parent_checkpoint(branch)
    before = read_run(folder.run_file)
    saved = dataclasses.replace(before, dataset=dataclasses.replace(before.dataset, **checkpoint.dataset or {}))
    changed = changes(saved, run)
    changed.pop("config.experiment", None)
    if run.config.nemo_model is None:  # the weights are those of the checkpoint
        changed.pop("config.nemo_model", None)
    allowed = DATA if run.config.data.allow_data_change else ()
    _check_identity(folder, changed, allowed=allowed, is_parent=True)
    _check_tokenizer(run, checkpoint)
    _check_past_blend(saved, run, checkpoint)
    _warn_of_rate_jump(before, run, changed, branch.step)
    return changed


def _how_to_restore(folder: RunFolder) -> str:
    copies = (attempt / RUN_FILE for attempt in reversed(folder.attempt_folders()))
    if newest := next(filter(Path.is_file, copies), None):
        return f"cp {newest} {folder.run_file}: the newest attempt's copy; or choose another --experiment"
    return "restore run.json, or choose another --experiment"


def _warn_of_rate_jump(before: ResolvedRun, now: ResolvedRun, changed: Changes, step: int) -> None:
    """Unless they are given, the schedule's lengths follow --max_steps: a longer run would raise the learning rate."""
    derived = sorted({"lr_decay_steps", "lr_warmup_steps"} & changed.keys())
    if not derived or any(name.startswith("config.optimizer.") for name in changed):
        return
    old, new = learning_rate(before, step), learning_rate(now, step)
    if not math.isclose(old, new, rel_tol=RATE_TOLERANCE):
        log.warning(
            "--max_steps %d -> %d moves the schedule: the learning rate of step %d is %.3g instead of %.3g. To "
            "keep the schedule: %s",
            *(before.max_steps, now.max_steps, step + 1, new, old),
            " ".join(f"--{name} {changed[name][0]}" for name in derived),
        )


def _check_identity(
    folder: RunFolder,
    changed: Changes,
    *,
    allowed: tuple[str, ...],
    is_parent: bool = False,
) -> None:
    fields = tuple(f"{field}." for field in IDENTITY if field not in allowed)
    if identity := {name: values for name, values in changed.items() if f"{name}.".startswith(fields)}:
        listed = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in identity.items())
        raise RequestError(
            f"the branch would be another run than its parent: {listed}"
            if is_parent
            else f"this experiment has checkpoints of another run: {listed}",
            needed="the same model, data, sequence length, split and seed, to continue",
            action="revert the change, or choose another --experiment (and --nemo_model to start from trained weights)"
            + ("; --allow_data_change continues with the new data" if identity.keys() <= set(DATA) else ""),
            where=str(folder.path),
        )


def _changed_weights(before: ResolvedRun, now: ResolvedRun) -> Changes:
    """The change of --nemo_model: none where it names the same weights by another spelling or at another path."""
    old, new = before.initial_weights, now.initial_weights
    changed = before.config.nemo_model, now.config.nemo_model
    if old and new:
        if old.source == new.source or same_fingerprint(old.fingerprint, new.fingerprint):
            return {}
        if old.fingerprint and new.fingerprint:
            changed = old.source, new.source
    return {} if changed[0] == changed[1] else {"config.nemo_model": changed}


def _check_past_blend(saved: ResolvedRun, now: ResolvedRun, newest: Checkpoint) -> None:
    """Refuse a schedule by which the samples that are used up would have been others, on the same data.

    Where each part goes on is counted from the weights of all steps before.
    """
    schedule, training = now.dataset.schedule, now.config.training
    if not schedule or not same_fingerprint(saved.dataset.data_hash, now.dataset.data_hash):
        return
    if samples_after(training, newest.step) != newest.consumed_samples:
        raise RequestError(
            f"{newest.consumed_samples} samples were used in {newest.step} steps, with another batch size",
            needed="the batch size of the first step in all steps, with which steps of the schedule are counted",
            action="start from --nemo_model in another --experiment",
            where="--blend_schedule",
        )
    past, wanted = (_weights_until(newest.step, run.dataset) for run in (saved, now))
    if past.keys() != wanted.keys() or not all(_same_blend(past[step], wanted[step]) for step in past):
        raise RequestError(
            f"it changes the weights of steps that are done: {wanted}, trained with {past}",
            needed=f"changes from step {newest.step} on, and before it the weights that the run has had",
            action=f"begin the change with '{newest.step}:', and keep the earlier ones",
            where="--blend_schedule",
        )


def _weights_until(step: int, dataset: DatasetFacts) -> dict[int, tuple[float, ...]]:
    """The weights of the steps before, by the step since which they hold."""
    changes = (decode(BlendChange, each) if isinstance(each, dict) else each for each in dataset.schedule)
    return {0: tuple(dataset.weights)} | {each.step: tuple(each.weights) for each in changes if each.step < step}


def _same_blend(old: Any, new: Any) -> bool:
    # Megatron divides weights by their sum: from equal quotients, to the bit, it draws the same samples.
    return bool(old and new and np.array_equal(np.array(old) / np.sum(old), np.array(new) / np.sum(new)))


def _as_lists(value: Any) -> Any:
    """A value with lists in place of tuples, as JSON has it."""
    if isinstance(value, dict):
        return {name: _as_lists(item) for name, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
