"""The watch over a node's ranks: what takes long is said in words, a rank that hangs is named with its stack.

It runs in the process that starts the ranks, which goes on when they don't. Every node has its own ranks write their
stacks; node 0 reads the records of all nodes, warns, and ends the run after --hang_timeout.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from logging import ERROR, WARNING
from pathlib import Path

import psutil

from pretrainkit import files
from pretrainkit.jobs.rendezvous import Endpoint
from pretrainkit.logs import get_logger
from pretrainkit.run import progress
from pretrainkit.run.folder import RUN_FILE, rank_stack_name
from pretrainkit.run.progress import RankProgress
from pretrainkit.units import format_duration, format_ranges, parse_duration

STACK_SIGNAL = signal.SIGRTMIN + 4
"""Makes a rank write its stacks (`pretrainkit.engine.progress`)."""
_POLL_S, _MAX_WRITE_INTERVAL_S, _WRITES_PER_S = 1.0, 10.0, 4.0
"""Between two looks at the ranks; between two writes to the disk that nodes share, which all of them together may make
so many of, from five nodes on."""
_LATE_S = 30.0
"""Age of another node's records from which on its ranks count as silent."""
_STACK_WAIT_S = 3.0
_FIRST_WORDS_S = 10.0
"""When a phase of a start is first said to go on; then at twice that, and so on."""
_SLOW_EVERY_S = 600.0
_SHOWN_FRAMES = 8
STOPPED = "is stopped by a signal"
_STOPPED_S = 30.0
"""A stopped process is a hang in any phase."""

log = get_logger(__name__)


class HangWatch:
    """Polled while the ranks run; says how long they have been at what, and when to end them."""

    def __init__(self, log_dir: Path, records: Path, endpoint: Endpoint, num_ranks: int) -> None:
        """`records`: folder of this node with the records of its ranks."""
        self._log_dir, self._records, self._endpoint = log_dir, records, endpoint
        self._ranks = range(endpoint.node * num_ranks, (endpoint.node + 1) * num_ranks)
        training = files.read_object(log_dir / RUN_FILE).get("config", {}).get("training", {})
        self._hang_timeout_s, self._save_timeout_s = (
            parse_duration(training.get(name, "01:00:00")) for name in ("hang_timeout", "save_timeout")
        )
        self._began_s = time.monotonic()
        self._next_s = self._next_write_s = self._next_slow_s = 0.0
        self._said: tuple[str, float] = ("", 0.0)
        """Phase whose duration was said last, and that duration."""
        self._warned_s = 0.0
        """Age of the last sign of progress when a warning was given; 0: there is none to take back."""
        self._note = ""
        self._seen: dict[int, tuple[tuple[RankProgress, ...], float]] = {}
        """What other nodes have published last, and when that was first seen."""

    def poll(self) -> str:
        """Look at the ranks, once a second; gives the reason why they must be ended, if there is one."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + _POLL_S
        own = [self._read(rank, now_s) for rank in self._ranks]
        if now_s >= self._next_write_s:
            self._write(own)
            shared_s = min(self._endpoint.num_nodes / _WRITES_PER_S, _MAX_WRITE_INTERVAL_S)
            self._next_write_s = now_s + max(_POLL_S, shared_s)
        is_head = self._endpoint.node == 0
        found = progress.AttemptProgress(0.0, "", self._all_nodes(own, now_s) if is_head else tuple(own))
        return self._judge(found, own)

    def _read(self, rank: int, now_s: float) -> RankProgress:
        found = progress.read_rank(self._records / str(rank), rank, now_s)
        age_s = now_s - self._began_s
        if found is None:
            return RankProgress(rank, phase_s=age_s, tick_s=age_s)
        return dataclasses.replace(found, state=_state(found.pid)) if found.silent_s > progress.SILENT_S else found

    def _write(self, own: Sequence[RankProgress]) -> None:
        progress.write_node(self._log_dir, self._endpoint.node, own, note=self._note)

    def _all_nodes(self, own: Sequence[RankProgress], now_s: float) -> tuple[RankProgress, ...]:
        """This node's ranks and those of the others, whose ages grow from when a new file of theirs was first seen."""
        ranks = list(own)
        for node in range(1, self._endpoint.num_nodes):
            found = progress.read_nodes([progress.node_file(self._log_dir, node)])
            if found is None:
                continue
            if self._seen.get(node, ((), 0.0))[0] != found.ranks:
                self._seen[node] = (found.ranks, now_s)
            age_s = now_s - self._seen[node][1]
            late_s = max(0.0, age_s - _LATE_S)
            ranks += [
                dataclasses.replace(
                    rank, phase_s=rank.phase_s + age_s, tick_s=rank.tick_s + age_s, silent_s=rank.silent_s + late_s
                )
                for rank in found.ranks
            ]
        return tuple(ranks)

    def _judge(self, found: progress.AttemptProgress, own: Sequence[RankProgress]) -> str:
        at = found.slowest
        age_s, after_s = at.tick_s, progress.warning_after_s(at.phase, found.step_time_s)
        if any(STOPPED in rank.state for rank in found.ranks):
            after_s = min(after_s, _STOPPED_S)
        if self._warned_s and age_s < self._warned_s:
            log.info("the ranks go on after %s", format_duration(self._warned_s))
            self._warned_s, self._note = 0.0, ""
        must_end = age_s >= progress.hang_limit_s(at.phase, self._hang_timeout_s, self._save_timeout_s)
        if must_end or (age_s >= after_s and age_s >= 2 * self._warned_s):
            self._warned_s, asked_s = age_s, time.time()
            self._dump_stacks([rank for rank in own if rank.pid and rank.silent_s > progress.SILENT_S])
            if self._endpoint.node == 0:
                words = self._explain(found, age_s, asked_s)
                log.log(ERROR if must_end else WARNING, "%s", words)
                self._note = words.partition("\n")[0]
                self._write(own)
                return self._note if must_end else ""
        elif not self._warned_s and self._endpoint.node == 0:
            self._say_phase(found, min(own, key=lambda rank: rank.ticks))  # other nodes' records are some seconds old
            self._say_slow(found)
        return ""

    def _say_phase(self, found: progress.AttemptProgress, at: RankProgress) -> None:
        """Say how long a phase has taken that is slow on purpose."""
        phase, said_s = self._said
        if at.phase != phase:
            phase, said_s = at.phase, 0.0
        first_s = _FIRST_WORDS_S * (3 if at.phase in (progress.SAVING, progress.EVALUATING) else 1)
        if at.phase != progress.TRAINING and at.phase_s >= max(first_s, 2 * said_s):
            others = progress.waited_for(found.ranks)
            behind = "" if len(others) != 1 or len(found.ranks) == 1 else f" (rank {others[0].rank}: {others[0].where})"
            log.info("%s: %s so far%s", at.phase, format_duration(at.phase_s, digits=0), behind)
            said_s = at.phase_s
        self._said = (phase, said_s)

    def _say_slow(self, found: progress.AttemptProgress) -> None:
        slow, now_s = progress.slow_rank(found.ranks), time.monotonic()
        if slow and now_s >= self._next_slow_s:
            self._note, self._next_slow_s = str(slow), now_s + _SLOW_EVERY_S
            log.warning("%s", slow)

    def _explain(self, found: progress.AttemptProgress, age_s: float, asked_s: float) -> str:
        """What hangs, in a line, and the stack of the rank that the others wait for."""
        suspects = progress.waited_for(found.ranks)
        step_time_s, phase = found.step_time_s, found.slowest.phase
        usual = "" if step_time_s is None else f", usually {format_duration(step_time_s, digits=2)}"
        what = "no step" if phase in (progress.TRAINING, progress.FIRST_STEP) else f"nothing new in '{phase}'"
        line = f"{what} for {format_duration(age_s, digits=0)}{usual}"
        if not suspects:
            first = found.ranks[0]
            return f"{line}; all ranks wait for each other, in a collective or for a GPU\n{self._stack(first, asked_s)}"
        first = suspects[0]
        numbers = format_ranges(rank.rank for rank in suspects)
        state = first.state or (_state(first.pid) if first.rank in self._ranks else "")
        detail = state or ("its process runs no Python code" if first.silent_s > progress.SILENT_S else first.where)
        who = "rank" if len(suspects) == 1 else "ranks"
        return f"{line}; waiting for {who} {numbers} ({detail})\n{self._stack(first, asked_s)}"

    def _dump_stacks(self, silent: Sequence[RankProgress]) -> None:
        """Write the stacks of this node's ranks that run no Python code.

        py-spy reads them from outside. Without it a rank writes them at a signal, unless it is stopped: it would get
        the signal when it goes on, and walking the stack of a thread that runs may crash it.
        """
        py_spy = shutil.which("py-spy")
        for rank in silent:
            path = self._log_dir / rank_stack_name(rank.rank)
            with suppress(OSError, subprocess.SubprocessError):
                if py_spy:
                    words = [py_spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
                    shown = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
                    path.write_bytes(shown.stdout)
                elif STOPPED not in rank.state:
                    os.truncate(path, 0)
                    os.kill(rank.pid, STACK_SIGNAL)
                    files.wait_until(functools.partial(_has_content, path), timeout_s=_STACK_WAIT_S)

    def _stack(self, rank: RankProgress, asked_s: float) -> str:
        """The innermost calls of a rank's main thread; of a silent one as they were written after `asked_s`."""
        calls: Sequence[str] = rank.stack
        path = self._log_dir / rank_stack_name(rank.rank)
        if rank.silent_s > progress.SILENT_S:
            wait_s = 0.0 if rank.rank in self._ranks else 2 * _STACK_WAIT_S
            files.wait_until(lambda: path.is_file() and path.stat().st_mtime >= asked_s, timeout_s=wait_s)
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            calls = main_frames(text, rank.main_thread)[:_SHOWN_FRAMES] or calls
        shown = "\n".join(f"    {call}" for call in calls) or "    (unknown)"
        return f"  rank {rank.rank} is in (innermost call first):\n{shown}"


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def main_frames(text: str, main_thread: str) -> list[str]:
    """The frames of the main thread, innermost first, in stacks as faulthandler or py-spy write them."""
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        head, _, body = block.partition("\n")
        if (main_thread and main_thread in head) or "MainThread" in head:
            return [line.strip() for line in body.splitlines() if line.strip()]
    return []


def _state(pid: int) -> str:
    """What the system says of a process, or of its children, that can't go on; empty for others."""
    words = {psutil.STATUS_STOPPED: STOPPED, psutil.STATUS_DISK_SLEEP: "waits for a disk"}
    with suppress(psutil.Error):
        process = psutil.Process(pid) if pid else None
        for each in (process, *process.children(recursive=True)) if process else ():
            if (status := each.status()) in words:
                name = "its process" if each == process else "its child process"
                continued = f"; kill -CONT {each.pid} continues it" if status == psutil.STATUS_STOPPED else ""
                return f"{name} {each.pid} {words[status]}{continued}"
    return ""
