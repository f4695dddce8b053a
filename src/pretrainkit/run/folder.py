"""An experiment's folder: its run.json, its attempts, and what may not change under a run that has checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit import files
from pretrainkit.config.run_file import read_run, to_json, write_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run.initial_weights import CACHE_NAME, COMMIT_MARK, fingerprints, newest_checkpoint

RUN_FILE = "run.json"
DRY_RUN_FILE = "dry_run.json"
"""Its place for a dry run of an experiment that has begun, whose run.json says what it is and what its jobs run."""
WEIGHTS_RECORD = "initial_weights.txt"
"""Says which weights a run began from, should they lie elsewhere later."""
CHECKPOINTS = "checkpoints"
LOGS = "logs"
JOBS = "jobs"
"""Folder of an experiment with its jobs' folders."""
RANKS_LOCK = ".ranks.lock"
"""Held by the process that has started ranks on this machine, until the last of them has ended."""
LAUNCHER_LOCK = ".launcher.lock"
"""Held by pretrain.py from before run.json is written until the run has ended."""

IDENTITY = (
    "model",
    "config.nemo_model",
    "config.data.sequence_length",
    "config.data.split",
    "config.training.seed",
    "dataset.weights",
    "dataset.data_hash",
)
"""Fields of run.json that say which run this is: weights, data, and the order in which it is read."""
DATA = ("dataset.weights", "dataset.data_hash")
"""Those of them that --allow_data_change lets change."""
_NOT_COMPARED = (
    "config.experiments_dir",
    "experiment_dir",
    "format_version",
    "initial_checkpoint",
    "hf_weights",
    "dataset.prefixes",
    "start_mode",
    "estimates",
)
"""Fields that name places, since a moved experiment, model or dataset is the same one, or follow from the others."""

_POLL_S = 0.2

log = get_logger(__name__)


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ between two run.json objects: dotted name -> (old, new), places left out."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    return {
        name: (before.get(name), after.get(name))
        for name in [*before, *(name for name in after if name not in before)]
        if not _is_same(name, before.get(name), after.get(name)) and not name.startswith(_NOT_COMPARED)
    }


def _is_same(name: str, old: Any, new: Any) -> bool:
    if name == "dataset.weights" and old and new:
        # Megatron divides weights by their sum: from equal quotients, to the bit, it draws the same samples.
        return np.array_equal(np.array(old) / np.sum(old), np.array(new) / np.sum(new))
    return bool(old == new)


def _leaves(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(item) if isinstance(item, tuple) else item


def is_identity(name: str) -> bool:
    """Whether a field of run.json says which run this is."""
    return any(name == field or name.startswith(f"{field}.") for field in IDENTITY)


def write_run_file(run: ResolvedRun, *, is_dry: bool = False) -> Path:
    """Write run.json, if the experiment may become this run; gives its path.

    Once it has checkpoints, its identity can't change: the same command continues it, another model, dataset,
    sequence length, split or seed is another experiment. Other changes are logged. Before the first
    checkpoint anything may change.

    Raises RequestError that names every changed field with both values.
    """
    experiment_dir = Path(run.experiment_dir)
    path = experiment_dir / (DRY_RUN_FILE if is_dry and has_begun(experiment_dir) else RUN_FILE)
    for name, (old, new) in changes_since_last_start(run).items():
        log.info("changed since the last start: %s: %s -> %s", name, old, new)
    if not is_dry and not has_checkpoints(experiment_dir):
        _record_weights(run)
    write_run(path, run)
    return path


def changes_since_last_start(run: ResolvedRun) -> dict[str, tuple[Any, Any]]:
    """Fields of run.json that a start would change: dotted name -> (old, new); empty before the first start.

    Raises RequestError as `write_run_file` does.
    """
    path = Path(run.experiment_dir) / RUN_FILE
    if not has_checkpoints(path.parent):
        return _changes_before_checkpoints(path, run)
    if not path.exists():
        raise RequestError(
            "checkpoints, but no run.json that says what they are of",
            action="restore run.json, or take another --experiment",
            where=str(path.parent),
        )
    before, now = to_json(read_run(path)), to_json(run)
    _compare_weights(path.parent, before, now)
    saved = before | {"dataset": before["dataset"] | _saved_data(path.parent)}
    _refuse_other_identity(path, changes(saved, now), allowed=DATA if run.config.data.allow_data_change else ())
    return changes(before, now)


def _changes_before_checkpoints(path: Path, run: ResolvedRun) -> dict[str, tuple[Any, Any]]:
    if not has_begun(path.parent):  # a run.json that is there is a dry run's
        return {}
    try:
        return changes(to_json(read_run(path)), to_json(run))
    except RequestError:  # nothing depends on it: it is replaced
        return {}


def _saved_data(experiment_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint's commit mark tells of the data it has learnt; nothing in older ones.

    run.json is of the last start, which may have had other data and ended before it saved.
    """
    newest = newest_checkpoint(experiment_dir / CHECKPOINTS)
    try:
        return dict(files.read_json(newest / COMMIT_MARK)["dataset"]) if newest else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _compare_weights(experiment_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Let --nemo_model of two run.json objects be equal where the weights are, and differ where they do.

    It may be spelt in another way, or lie elsewhere now. Where the weights themselves don't tell, its text counts.
    """
    old, new = _initial_weights(before), _initial_weights(now)
    if not old or not new:
        return
    first, second = _first_fingerprints(experiment_dir, old), fingerprints(new)
    if old == new or set(first) & set(second):
        now["config"]["nemo_model"] = before["config"]["nemo_model"]
    elif first and second:
        before["config"]["nemo_model"], now["config"]["nemo_model"] = str(old), str(new)


def _initial_weights(run: dict[str, Any]) -> Path | None:
    """What --nemo_model of a run.json object points to."""
    initial, original = run["initial_checkpoint"], run["hf_weights"]
    if initial and original and Path(initial).parent.name == CACHE_NAME:
        return Path(original)
    return Path(initial) if initial else None


def _first_fingerprints(experiment_dir: Path, weights: Path) -> list[str]:
    """What tells the weights again that a run began from; `weights`: where they lay, and maybe still lie."""
    record = experiment_dir / WEIGHTS_RECORD
    recorded = record.read_text(encoding="ascii").strip() if record.is_file() else ""
    found = fingerprints(weights)
    return [recorded] if recorded and recorded not in found else found


def _record_weights(run: ResolvedRun) -> None:
    if weights := _initial_weights(to_json(run)):
        best = next(iter(fingerprints(weights)), "")
        files.write_text(Path(run.experiment_dir) / WEIGHTS_RECORD, f"{best}\n")


def begun_from(nemo_model: str, experiment_dir: Path) -> ResolvedRun | None:
    """The run as it was last started, if `nemo_model` names the weights that it began from and it reads them no more.

    It reads them no more once a checkpoint of its own has a commit mark: from then on a start continues or is
    refused. None otherwise.
    """
    if not will_continue(experiment_dir):
        return None
    try:
        run = read_run(experiment_dir / RUN_FILE)
    except RequestError:  # told by changes_since_last_start
        return None
    first = _initial_weights(to_json(run))
    is_named = nemo_model == run.config.nemo_model or Path(nemo_model).expanduser().resolve() == first
    return run if first and is_named else None


def will_continue(experiment_dir: Path) -> bool:
    """Whether a start goes on from a checkpoint of the experiment, or is refused for those it finds there."""
    return newest_checkpoint(experiment_dir / CHECKPOINTS) is not None


def has_begun(experiment_dir: Path) -> bool:
    """Whether an experiment was started, or a job of it submitted."""
    return any((experiment_dir / folder).exists() for folder in (CHECKPOINTS, LOGS, JOBS))


def has_checkpoints(experiment_dir: Path) -> bool:
    """Whether an experiment has saved anything."""
    folder = experiment_dir / CHECKPOINTS
    return folder.is_dir() and any(folder.iterdir())


def _refuse_other_identity(path: Path, changed: dict[str, tuple[Any, Any]], *, allowed: tuple[str, ...]) -> None:
    identity = {name: values for name, values in changed.items() if is_identity(name) and name not in allowed}
    if identity:
        listed = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in identity.items())
        raise RequestError(
            f"this experiment has checkpoints of another run: {listed}",
            needed="the same model, data, sequence length, split and seed, to continue",
            action="take them back, or take another --experiment (and --nemo_model to start from trained weights)"
            + ("; --allow_data_change goes on with the new data" if identity.keys() <= set(DATA) else ""),
            where=str(path.parent),
        )


def new_attempt(experiment_dir: Path) -> tuple[int, Path]:
    """Number and new, empty log folder of the next attempt; the first is 1."""
    logs = experiment_dir / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    number = max((_attempt_number(path) for path in logs.glob("attempt_*")), default=0) + 1
    while True:
        folder = logs / f"attempt_{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another node of the same job, or another start, was faster
            number += 1
        else:
            return number, folder


def attempts(experiment_dir: Path) -> list[Path]:
    """The log folders of all attempts, in order."""
    folders = [path for path in (experiment_dir / LOGS).glob("attempt_*") if _attempt_number(path)]
    return sorted(folders, key=_attempt_number)


def newest_attempt(experiment_dir: Path) -> Path | None:
    """The log folder of the last attempt; None before the first."""
    folders = attempts(experiment_dir)
    return folders[-1] if folders else None


def _attempt_number(path: Path) -> int:
    digits = path.name.removeprefix("attempt_")
    return int(digits) if digits.isdigit() else 0


@contextmanager
def locked(experiment_dir: Path, name: str) -> Iterator[None]:
    """Hold one of an experiment's locks. Raises RequestError when another process holds it.

    Where the file system has no locks, the run goes on without this protection.
    """
    experiment_dir.mkdir(parents=True, exist_ok=True)
    with (experiment_dir / name).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RequestError(
                f"this experiment is running already (process {lock.read().strip() or 'unknown'})",
                action="wait for it, stop it, or take another --experiment",
                where=str(experiment_dir),
            ) from None
        except OSError as error:
            log.warning("no file locks here (%s): nothing keeps a second start away", error.strerror)
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        yield


def wait_for_ranks(experiment_dir: Path, *, longest_s: float) -> None:
    """Wait until no rank of the experiment runs on this machine: those of a launcher that was killed save and end.

    Raises RequestError when they are still there after `longest_s`.
    """
    end_s, told = time.monotonic() + longest_s, False
    while True:
        try:
            with locked(experiment_dir, RANKS_LOCK):
                return
        except RequestError:
            if time.monotonic() > end_s:
                raise
        if not told:
            log.warning("waiting for the ranks of a start that was killed: they save and end")
            told = True
        time.sleep(_POLL_S)
