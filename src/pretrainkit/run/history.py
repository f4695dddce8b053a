"""The course of an experiment over all its attempts, read from its folder: as records, a summary, and a picture."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.run.attempts import Attempt, read_attempts, restarts_without_progress
from pretrainkit.run.checkpoints import all_complete, newest_complete, optimizer_layout, problem_of
from pretrainkit.run.evaluations import EVENT as EVALUATION
from pretrainkit.run.folder import CHAIN_FILE, JOBS_FILE, OUTCOME_FILE, RunFolder
from pretrainkit.run.held_out import GROUPS
from pretrainkit.run.json_lines import read_records
from pretrainkit.run.progress import read_attempt
from pretrainkit.units import format_count

RATE_STEPS = 100
"""The speed that is shown is the median of so many last records."""
_STEP_FIELDS = {"step", "loss", "learning_rate"}


@dataclass(frozen=True)
class History:
    """The course of an experiment."""

    steps: tuple[dict[str, Any], ...]
    """The record of each step, in order; the last one, where a restart repeated the step."""
    evaluations: tuple[dict[str, Any], ...]
    """The record of each evaluation on held-out data (`pretrainkit.run.held_out`), in order, each step once."""
    results: tuple[dict[str, Any], ...]
    """The events `evaluation`: of a step the `tasks` with their metrics, each step once."""
    attempts: tuple[Attempt, ...]
    summary: dict[str, Any]
    """All but the curves, as a JSON object."""

    @property
    def validation(self) -> tuple[tuple[int, float | None], ...]:
        """(step, held-out loss)."""
        return tuple((record["step"], record["val_loss"]) for record in self.evaluations)

    def describe(self) -> str:
        """The summary for people: aligned lines, without a newline at the end."""
        found = self.summary
        loss, held_out, rate, mfu = (found[name] for name in ("loss", "val_loss", "tokens_per_second", "mfu"))
        lines = [
            ("experiment", found["experiment"]),
            *([("branch", "of {experiment} at step {step}".format(**found["branch"]))] if found["branch"] else []),
            ("steps", f"{found['steps_done']} of {found['max_steps'] or 'unknown'}, {_count(found['tokens'])} tokens"),
            ("loss", "none" if loss is None else f"{loss:.4f}"),
            ("held-out", "none" if held_out is None else f"{held_out:.4f} at step {found['val_loss_step']}"),
            *(("", line) for line in self._losses_by_source()),
            ("lr", "none" if found["learning_rate"] is None else f"{found['learning_rate']:.4g}"),
            ("speed", f"{_count(rate)} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")),
            (
                "restarts",
                f"{found['restarts']}, {found['idle_restarts']} of the last in a row without a new step; "
                f"{found['replayed_steps']} steps repeated",
            ),
        ]
        for each in self.attempts:
            steps = f"steps {each.start_step} -> {each.last_step}"
            lines.append(("start", f"{each.time}  {each.mode or ''}  {steps}  {each.world_size or '?'} ranks"))
        lines += [
            ("bad steps", ", ".join(map(str, found["bad_steps"])) or "none"),
            *([("rollbacks", f"after steps {', '.join(map(str, found['rollbacks']))}")] if found["rollbacks"] else []),
            ("no save", ", ".join(map(str, found["missed_saves"])) or "none"),
            ("checkpoint", found["newest_checkpoint"] or found["checkpoint_problem"] or "none"),
            ("", f"{found['complete_checkpoints']} complete, {found['with_optimizer_state']} with optimizer state"),
        ]
        for name, problem in found.get("damaged_checkpoints", {}).items():
            lines.append(("damaged", f"{name}: {problem}"))
        for log in found["logs"]:
            code = log["progress"] or "no outcome" if log["exit_code"] is None else f"exit code {log['exit_code']}"
            lines.append(("logs", f"{log['folder']}  {code}{', ' if log['reason'] else ''}{log['reason']}"))
            lines += [("", log["note"])] if log["note"] else []
        for job in found["jobs"]:
            lines.append(("job", f"{job['scheduler']} {job['job_id']}  log {job['log']}  {job['state']}"))
            for start in job["earlier_starts"]:
                code = "no exit code" if start["exit_code"] is None else f"exit code {start['exit_code']}"
                lines.append(("", f"an earlier start: log {start['log']}  {code}"))
        return "\n".join(f"{name:<10} {value}" for name, value in lines)

    def _losses_by_source(self) -> Iterator[str]:
        """The held-out losses of the first and the last evaluation by set, label and part."""
        for group, name, values in losses_by_source(self.evaluations):
            (first, before), (last, now) = values[0], values[-1]
            was = f", {before:.4f} at step {first}" if last != first and before is not None else ""
            yield f"{group} {name}: {'none' if now is None else f'{now:.4f}'}{was}"


def losses_by_source(
    evaluations: Sequence[Mapping[str, Any]], metric: str = "loss"
) -> list[tuple[str, str, list[tuple[int, float | None]]]]:
    """(group, name, [(step, value), ...]) of each part, label and set that evaluations have a metric of.

    Parts are left out where they are the labels.
    """
    found: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for record in evaluations:
        for group in reversed(GROUPS):
            for name, value in record.get(f"val_{metric}_by_{group}", {}).items():
                found.setdefault((group, name), []).append((record["step"], value))
    labels = {name for group, name in found if group == "label"}
    parts = {name for group, name in found if group == "part"}
    return [(*key, values) for key, values in found.items() if key[0] != "part" or not parts <= labels]


def losses_of(record: Mapping[str, Any], metric: str = "loss") -> dict[str, float | None]:
    """A metric of one evaluation, by 'set NAME', 'label NAME' and 'part NAME'."""
    return {f"{group} {name}": values[0][1] for group, name, values in losses_by_source([record], metric)}


def read_history(experiment: Path, *, verify: bool = False) -> History:
    """Read an experiment's folder; with `verify`, all bytes of its checkpoints too.

    Raises RequestError when it was never started.
    """
    folder = RunFolder(experiment)
    if not (folder.metrics.is_file() or folder.logs.is_dir() or folder.jobs.is_dir()):
        raise RequestError(
            "no metrics.jsonl, logs or jobs here",
            needed="the folder of an experiment that was started",
            where=str(experiment),
        )
    records, attempts = read_records(folder.metrics), read_attempts(folder)
    trained = [record for record in records if record.keys() >= _STEP_FIELDS and "event" not in record]
    steps = _by_step(trained)
    evaluations = _by_step(each for each in records if each.keys() >= {"step", "val_loss"})
    results = _by_step(each for each in records if each.get("event") == EVALUATION and "step" in each)
    rates = [record["tokens_per_second"] for record in steps[-RATE_STEPS:] if "tokens_per_second" in record]
    last, last_written = steps[-1] if steps else {}, trained[-1] if trained else {}
    described = files.read_object(folder.run_file)
    summary = {
        "experiment": str(experiment),
        "steps_done": max((attempt.last_step for attempt in attempts), default=last.get("step", 0)),
        "branch": described.get("branch"),
        "max_steps": described.get("max_steps"),
        "tokens": last_written.get("tokens"),
        "loss": last.get("loss"),
        "val_loss": evaluations[-1]["val_loss"] if evaluations else None,
        "val_loss_step": evaluations[-1]["step"] if evaluations else None,
        "first_evaluation": evaluations[0] if evaluations else None,
        "last_evaluation": evaluations[-1] if evaluations else None,
        "results": list(results),
        "learning_rate": last.get("learning_rate"),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "tflops_per_rank": last_written.get("tflops_per_rank"),
        "mfu": last_written.get("mfu"),
        "starts": [
            {"time": each.time, "mode": each.mode, "first_step": each.start_step, "last_step": each.last_step}
            | {"world_size": each.world_size}
            for each in attempts
        ],
        "restarts": max(0, len(attempts) - 1),
        "idle_restarts": restarts_without_progress(attempts),
        "replayed_steps": len(trained) - len(steps),
        "bad_steps": _steps_of("bad_loss", records),
        "rollbacks": _steps_of("rollback", records),
        "missed_saves": _steps_of("missed_save", records),
        **_checkpoints(folder),
        **({"damaged_checkpoints": _damaged(folder)} if verify else {}),
        "logs": [_outcome(log_folder) for log_folder in folder.attempt_folders()],
        "jobs": [_job(record) for record in _with_continuing_jobs(read_records(folder.jobs / JOBS_FILE))],
    }
    return History(steps, evaluations, results, tuple(attempts), summary)


def _by_step(records: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """In order of steps, of each the last record."""
    return tuple(record for _, record in sorted({record["step"]: record for record in records}.items()))


def _checkpoints(folder: RunFolder) -> dict[str, Any]:
    """The newest complete checkpoint, or why there is none although there should be one, and the number of all."""
    newest, problem = None, ""
    try:
        newest = newest_complete(folder.checkpoints)
    except CheckpointError as error:
        problem = str(error)
    layouts = []
    for checkpoint in all_complete(folder.checkpoints):
        with contextlib.suppress(OSError):  # retention is removing it
            layouts.append(optimizer_layout(checkpoint))
    return {
        "newest_checkpoint": str(newest.path) if newest else None,
        "complete_checkpoints": len(layouts),
        "with_optimizer_state": sum(layout is not None for layout in layouts),
        "checkpoint_problem": problem,
    }


def _damaged(folder: RunFolder) -> dict[str, str]:
    """What is wrong in the complete checkpoints whose bytes are not those that were saved, by name."""
    problems = {found.path.name: problem_of(found) for found in all_complete(folder.checkpoints)}
    return {name: problem for name, problem in problems.items() if problem}


def _steps_of(event: str, records: list[dict[str, Any]]) -> list[int]:
    return sorted({record["step"] for record in records if record.get("event") == event and "step" in record})


def _outcome(log_folder: Path) -> dict[str, Any]:
    """How an attempt ended, or what it is doing; neither: the process that started it was killed early."""
    outcome = files.read_object(log_folder / OUTCOME_FILE)
    found = {"folder": str(log_folder), "exit_code": outcome.get("exit_code"), "reason": outcome.get("reason", "")}
    now = None if outcome else read_attempt(log_folder)
    return {
        **found,
        "progress": now.describe() if now else "",
        "last_step_age_s": round(now.slowest.tick_s + now.age_s, 1) if now else None,
        "note": now.note if now else "",
    }


def _with_continuing_jobs(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records of jobs, and of those that PBS jobs have submitted to continue them, as their folder's chain says."""
    known = {record["job_id"] for record in records}
    for number, record in enumerate(records, 1):
        yield record
        chain, folder = Path(record["folder"], CHAIN_FILE), Path(record["folder"])
        if record["folder"] in {later["folder"] for later in records[number:]} or not chain.is_file():
            continue
        for job_id in (line.partition(".")[0] for line in chain.read_text(encoding="utf-8").splitlines()):
            if job_id not in known:
                log, exit_file = folder / f"{record['scheduler']}-{job_id}.log", folder / f"exit-{job_id}"
                yield {**record, "job_id": job_id, "logs": [str(log)], "exit_files": [str(exit_file)]}


def _job(record: dict[str, Any]) -> dict[str, Any]:
    """A job as `pretrainkit.jobs.submit` recorded it, with the starts before it was requeued.

    Its log is there from its start on, its exit code from its end on. Without the latter it may also have been killed,
    which its scheduler knows.
    """
    exit_file, log = Path(record["exit_files"][0]), Path(record["logs"][0])
    code = _exit_code(exit_file)
    state = f"exit code {code}" if code is not None else "running" if log.is_file() else "queued"
    earlier = []
    for number in itertools.count(1):
        its_exit_file = exit_file.with_name(f"{exit_file.name}.{number}")
        its_log = log.with_name(f"{log.stem}.{number}{log.suffix}")
        if not its_exit_file.is_file() and not its_log.is_file():
            break
        earlier.append({"log": str(its_log), "exit_code": _exit_code(its_exit_file)})
    found = {"scheduler": record["scheduler"], "job_id": record["job_id"], "log": str(log), "exit_code": code}
    return {**found, "state": state, "earlier_starts": earlier}


def _exit_code(file: Path) -> int | None:
    """The exit code of a job's start; None while there is none, as of one whose node has died."""
    return int(file.read_text(encoding="ascii")) if file.is_file() else None


def _count(number: float | None) -> str:
    return "no" if number is None else format_count(number)
