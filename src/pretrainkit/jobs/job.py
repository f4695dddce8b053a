"""A job for a scheduler: what its scripts are rendered from. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import RequestError
from pretrainkit.jobs.container import Container
from pretrainkit.units import format_ranges

_MAX_NAME = 64


@dataclass(frozen=True)
class Array:
    """Tasks of a job array, counted from 0 in every scheduler."""

    indices: tuple[int, ...]
    """Tasks to run, ascending."""
    count: int
    """Number of all tasks; `indices` may be some of them that are rerun."""
    at_once: int | None = None
    """Maximum number of tasks that run at a time."""

    def __str__(self) -> str:
        return format_ranges(self.indices) + (f"%{self.at_once}" if self.at_once else "")


@dataclass(frozen=True)
class Job:
    """What is submitted."""

    name: str
    folder: Path
    """Absolute folder of this submission: scripts, logs, the source that runs."""
    work_dir: Path
    """Where the command runs."""
    command: tuple[str, ...]
    """Program and arguments that every node or array task runs."""
    config: LaunchConfig
    container: Container | None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables inside the container."""
    on_gpu: bool = False
    num_nodes: int = 1
    ranks_per_node: int = 1
    time_limit: str | None = None
    """[D-]HH:MM:SS"""
    warning_s: int | None = None
    """Seconds before the end of its time at which Slurm sends a signal; None: it sends none."""
    array: Array | None = None
    umask: int = 0o022
    """File mode creation mask of the submitter: a PBS job starts with 077, one of Grid Engine with 022."""
    secrets: Path | None = None
    """File with mode 600 that exports tokens."""
    evaluation: Evaluation | None = None
    """Further jobs that this one submits while it runs."""

    @property
    def script_name(self) -> str:
        """The job's name as every scheduler accepts it: letters, digits, '_', '-' and '.', beginning with a letter."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.name).strip("_.-") or "job"
        return (name if name[0].isalpha() else f"j{name}")[:_MAX_NAME]

    @property
    def in_pyxis(self) -> bool:
        """Whether srun enters the container."""
        return self.container is not None and self.container.runtime == "pyxis"

    @property
    def scheduler_options(self) -> list[str]:
        """Further lines of the script's header."""
        return [self.filled(text, "scheduler_options") for text in self.config.scheduler_options]

    def filled(self, text: str, where: str) -> str:
        """A text of the site with {num_nodes} and the like replaced. Raises RequestError for another name."""
        numbers = {
            "num_nodes": self.num_nodes,
            "num_gpus": self.ranks_per_node,
            "num_ranks": self.num_nodes * self.ranks_per_node,
            "num_cpus": self.config.cpus_per_task or 1,
        }

        for name in re.findall(r"\{(\w+)\}", text):
            if name not in numbers:
                raise RequestError(f"{{{name}}} in {text!r}", needed=f"one of {', '.join(numbers)}", where=where)
            text = text.replace(f"{{{name}}}", str(numbers[name]))
        return text


@dataclass(frozen=True)
class Evaluation:
    """The job that evaluates checkpoints: submitted by the training's job whenever marks say that one is due."""

    marks: Path
    """Folder of the marks (`pretrainkit.run.evaluations`)."""
    job: Job


def parse_array(text: str, count: int | None) -> Array:
    """An array from '0-9', '3,7', '0-20:2' or any of them with the suffix '%4'.

    Args:
        count: number of all tasks, if known.

    Raises:
        RequestError: another form, or a task that isn't below `count`.
    """
    body, percent, limit = text.partition("%")
    form = "0-9, 3,7 or 0-20:2, with the suffix %4 for at most 4 at once"
    wrong = RequestError(f"{text!r}", needed=form, where="--array")
    indices: set[int] = set()
    for part in body.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if not match or (match[3] and int(match[3]) == 0):
            raise wrong
        first, last = int(match[1]), int(match[2] or match[1])
        indices |= set(range(first, last + 1, int(match[3] or 1)))
    if not indices or (percent and not (limit.isdigit() and int(limit))):
        raise wrong
    ordered = tuple(sorted(indices))
    if count is not None and ordered[-1] >= count:
        raise RequestError(f"task {ordered[-1]} of {count}", needed=f"tasks from 0 to {count - 1}", where="--array")
    if count is None and ordered == tuple(range(len(ordered))):
        count = len(ordered)
    return Array(ordered, count or ordered[-1] + 1, int(limit) if limit else None)
