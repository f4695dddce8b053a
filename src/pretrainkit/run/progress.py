"""What the ranks of an attempt are doing: their records, which rank the others wait for, which one is slow.

A rank writes its record to a folder of its node (`pretrainkit.engine.progress`). The process that starts the ranks
collects them in progress_NODE.json of the attempt's log folder (`pretrainkit.launch.hang_watch`), where node 0,
pretrain.py and inspect_run.py find those of all nodes.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.records import RecordError, decode
from pretrainkit.units import format_duration

FOLDER_VARIABLE = "PRETRAINKIT_PROGRESS_DIR"
"""Environment variable of the ranks: folder on their node for their records."""
STARTING = "starting the ranks"
IMPORTING = "importing NeMo and Megatron-core"
CONNECTING = "connecting to the trackers"
PREPARING = "preparing the dataset"
BUILDING = "building the model"
LOADING = "loading the weights"
CHECKING = "checking the model before the first step"
FIRST_STEP = "the first step"
TRAINING = "training"
EVALUATING = "evaluating"
SAVING = "saving"
FINISHING = "finishing"
"""Phases of a rank, in the words of the log."""

START_LIMIT_S = 3600.0
"""Longest phase of a start, if --hang_timeout isn't longer (assumed: a large checkpoint from a slow file system)."""
SILENT_S = 10.0
"""A rank whose record is older runs no Python code: it writes one a second (assumed: imports block it for less)."""
SLOW_RATIO, SLOW_COST = 1.5, 0.1
"""A rank is slow when its own work takes this many times as long as that of its peers, and costs this share of time."""
_RECORD_BYTES = 4096


@dataclass(frozen=True)
class RankProgress:
    """What a rank is doing; ages in seconds, as of the moment at which the record was read."""

    rank: int
    pid: int = 0
    phase: str = STARTING
    step: int = 0
    ticks: int = 0
    """Phases, microbatches, steps and batches of evaluations that have begun or ended: the same on all ranks."""
    phase_s: float = 0.0
    tick_s: float = 0.0
    silent_s: float = 0.0
    """Age of the record itself."""
    is_waiting: bool = False
    """Whether its main thread is in a collective, or waits for the GPU."""
    stack: tuple[str, ...] = ()
    """The last calls of its main thread, innermost first: file, line and function."""
    main_thread: str = ""
    """Id of that thread in stacks that faulthandler writes."""
    stage: int = 0
    """Pipeline stage: ranks of one stage have the same work."""
    step_time_s: float | None = None
    """Median of its last steps."""
    busy: float | None = None
    """Share of the last minute of training in which it wasn't waiting for other ranks."""
    data: float | None = None
    """Share in which it waited for data."""
    state: str = ""
    """What the system says of its process, where that explains a hang."""

    @property
    def where(self) -> str:
        """The innermost call, without the folder."""
        return self.stack[0].rpartition("/")[2] if self.stack else ""


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for in every step."""

    rank: int
    ratio: float
    """Its own work, as a multiple of the median of its peers."""
    cost: float
    """Share of the run's time that is lost to that."""
    data: float
    """Share of its own work that is waiting for data."""

    def __str__(self) -> str:
        cause = f", {self.data:.0%} of it waiting for data" if self.data > 0.3 else ""
        return (
            f"rank {self.rank} takes {self.ratio:.1f} times as long as the median of its peers{cause}: "
            f"it costs {self.cost:.0%} of the speed"
        )


def hang_limit_s(phase: str, hang_timeout_s: float, save_timeout_s: float = 0.0) -> float:
    """How long nothing may happen in a phase until the run is ended."""
    if phase in (TRAINING, EVALUATING):
        return hang_timeout_s
    if phase in (SAVING, FINISHING):
        return hang_timeout_s + save_timeout_s
    return max(hang_timeout_s, START_LIMIT_S)


def warning_after_s(phase: str, step_time_s: float | None) -> float:
    """How long nothing may happen in a phase until the log asks why; other phases are slow on purpose."""
    usual_s = step_time_s or 0.0
    return {TRAINING: max(30.0, 5 * usual_s), EVALUATING: max(60.0, 10 * usual_s)}.get(phase, math.inf)


def waited_for(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    """The ranks that the others wait for: stopped or silent ones, else the last of those that are not in a collective.

    Empty when no rank differs from the others.
    """
    silent = [rank for rank in ranks if rank.state] or [rank for rank in ranks if rank.silent_s > SILENT_S]
    working = silent or [rank for rank in ranks if not rank.is_waiting] or list(ranks)
    least = min((rank.ticks for rank in working), default=0)
    behind = [rank for rank in working if rank.ticks == least]
    return behind if len(behind) < len(ranks) or len(ranks) == 1 else []


def slow_rank(ranks: Sequence[RankProgress]) -> SlowRank | None:
    """The slowest rank, if the others of its pipeline stage have to wait for it."""
    found = []
    for rank in ranks:
        peers = [each.busy for each in ranks if each.stage == rank.stage and each is not rank and each.busy is not None]
        if not peers or not rank.busy:
            continue
        usual = max(statistics.median(peers), 0.01)
        found.append(SlowRank(rank.rank, rank.busy / usual, rank.busy - usual, (rank.data or 0.0) / rank.busy))
    slow = [each for each in found if each.ratio >= SLOW_RATIO and each.cost >= SLOW_COST]
    return max(slow, key=lambda each: each.cost, default=None)


def encode_record(record: dict[str, Any]) -> bytes:
    """A rank's record as bytes that always fill the same part of its file."""
    return json.dumps(record).encode().ljust(_RECORD_BYTES)


def read_rank(path: Path, rank: int, now_s: float) -> RankProgress | None:
    """The record of a rank of this node; None where there is none, or one that is being written.

    In the file are points in time of time.monotonic(), which the processes of a machine share.
    """
    try:
        record = json.loads(path.read_bytes())
        ages = {f"{name}_s": now_s - record.pop(f"{name}_at_s") for name in ("phase", "tick", "silent")}
        return decode(RankProgress, {"rank": rank, **ages, **record}, all_fields=False)
    except (OSError, ValueError, KeyError, RecordError):
        return None


def node_file(log_dir: Path, node: int) -> Path:
    """The records of a node's ranks, in an attempt's log folder."""
    return log_dir / f"progress_{node}.json"


def write_node(log_dir: Path, node: int, ranks: Sequence[RankProgress], *, note: str = "") -> None:
    """Publish the records of a node's ranks, and on node 0 what was last said of them. Nothing waits for the disk."""
    value = {"time": time.time(), "note": note, "ranks": [asdict(rank) for rank in ranks]}
    path = node_file(log_dir, node)
    temporary = files.temporary_name(path)
    with suppress(OSError):  # a full disk: the log has what is said
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(path)


@dataclass(frozen=True)
class AttemptProgress:
    """What an attempt is doing, by the records of its nodes."""

    age_s: float
    """Since the newest record was written."""
    note: str
    ranks: tuple[RankProgress, ...]

    @property
    def slowest(self) -> RankProgress:
        """The rank that is furthest behind; a silent one's record may be older than what it did last."""
        heard = [rank for rank in self.ranks if rank.silent_s <= SILENT_S] or self.ranks
        return min(heard, key=lambda rank: rank.ticks)

    @property
    def step_time_s(self) -> float | None:
        """Median of the last steps."""
        return next((rank.step_time_s for rank in self.ranks if rank.step_time_s is not None), None)

    def describe(self) -> str:
        """What it is doing, with the age of the last step, in one line."""
        at, step = self.slowest, max(rank.step for rank in self.ranks)  # a stopped rank's record may be a second old
        if self.age_s > 60:
            return f"no sign of life for {format_duration(self.age_s)}; it was at step {step}, {at.phase}"
        if at.phase != TRAINING:
            return f"{at.phase}, for {format_duration(at.phase_s + self.age_s)}; step {step} is done"
        usual = "" if self.step_time_s is None else f", usually {format_duration(self.step_time_s, digits=2)} a step"
        return f"step {step}, {format_duration(at.tick_s + self.age_s)} ago{usual}"


def read_attempt(log_dir: Path) -> AttemptProgress | None:
    """What the nodes of an attempt have published; None before they have."""
    return read_nodes(sorted(log_dir.glob("progress_*.json")))


def read_nodes(paths: Sequence[Path]) -> AttemptProgress | None:
    """What nodes have published; None before any has."""
    found = [value for value in map(files.read_object, paths) if value]
    try:
        ranks = tuple(decode(RankProgress, rank, all_fields=False) for each in found for rank in each["ranks"])
        age_s = time.time() - max((each["time"] for each in found), default=0.0)
        return AttemptProgress(max(0.0, age_s), "".join(each["note"] for each in found), ranks) if ranks else None
    except (RecordError, KeyError):
        return None
