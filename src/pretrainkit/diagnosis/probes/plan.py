"""What is measured inside the program, in which order; every rank follows it step by step.

observe   the program as it is: phases, functions
data      as it is, and on a GPU | the same batches again without reading them
changes   as it is | one change, in turn, likely ones first, until it is known what each saves or the time is over
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any

import torch

from pretrainkit.diagnosis.observe import batches, facts, hooks, phases
from pretrainkit.diagnosis.observe.sampler import Sampler, own_frames
from pretrainkit.diagnosis.observe.session import LARGEST_SET_BYTES, Session
from pretrainkit.diagnosis.observe.streams import depth_of, replay, reread
from pretrainkit.diagnosis.observe.windows import MOST_STEPS, Measuring, Steps, Window, measure, warm_up
from pretrainkit.diagnosis.probes import switches
from pretrainkit.diagnosis.probes.switches import Switch
from pretrainkit.diagnosis.spec import read_spec
from pretrainkit.diagnosis.statistics import Interval, saved_share, whole

ROUNDS, MOST_ROUNDS = 18, 50
"""Pairs of windows of each change that may save time, and of one on a machine that others use."""
WORTH_TELLING = 0.025
"""Share of the time from which a change is of interest."""
FIRST_ROUNDS = 6
"""Windows of which batches are kept, and of a start for its speed alone."""
WATCHED_WINDOWS, WATCHED_SLOW_STEPS = 4, 2
"""Length of the look at the program as it is: enough samples of its stack."""
WORTH_REPLACING = 0.01
"""Share of the time for data, as it was seen, from which the data is replaced to see what that saves."""
DATA_UNTIL = 0.3
"""Part of the budget in which batches are collected."""
SLOW_STEP = 1 / 40
"""Of the budget: steps that take longer are looked at one by one."""
READING_S = 0.5
"""Length of the look at how batches are made."""
MUCH_SHORTER, MOST_CHANGED_STEPS = 1.5, 64
"""A window with a change that is so many times shorter than one without gets more steps, at most so many."""
LONGEST_SETTLING = 16
"""Steps that are let pass, at most, until a loader's queue is in its usual state."""


def install() -> None:
    """Begin to watch this process, if it was started by the diagnosis. Called right after torch is imported."""
    if spec := read_spec():
        hooks.install(Session(spec, follow=lambda session: Plan(session).follow()))


class Plan:
    """The course of one rank's measurements."""

    def __init__(self, session: Session) -> None:
        self._session, self._spec = session, session.spec
        self._windows: list[Window] = []
        self._pairs: dict[str, list[dict[str, Any]]] = {}
        """Of each change what was measured without and with it, for the same work."""
        self._pair_s: dict[str, float] = {}
        """Time that a pair of windows took, settling included."""
        self._steps = 2
        self._per_step = 1
        """Micro batches of a step, in the last window."""
        self._changed_steps: dict[str, int] = {}
        """Steps of a window with a change after which steps are much shorter."""
        self._over: list[Any] | None = None
        """Batches that the last window replayed."""
        self._seen: list[Any] = []
        self._kept: list[Any] = []
        self._begin_s = time.perf_counter()
        self._optimizer_s = 0.0
        """Of a step, with the device waited for."""
        self._why_not: dict[str, str] = {}
        self._switches: dict[str, Switch] = {}

    def follow(self) -> Steps:
        """Measure all that the spec wants."""
        session = self._session
        self._steps = yield from warm_up(session, SLOW_STEP * self._spec.budget_s)
        if self._spec.speed_only:
            yield from self._speed()
            return
        yield from self._observe()
        yield from self._data()
        share = self._saved("data").high if "data" in self._pairs else session.observed.get("data", 0.0)
        built, self._why_not = switches.build(session, self._kept, self._seen, session.agree(share))
        self._switches = {name: built[name] for name in session.agree(list(built)) if name in built}
        while name := session.agree(self._next()):
            yield from self._data_pair() if name == "data" else self._pair(name)
            self._save()
        self._save(peak_memory_gib=_peak_memory_gib(session), worker_samples=self._reading())

    def _speed(self) -> Steps:
        for number in range(FIRST_ROUNDS):
            if number < 2 or self._session.agree(self._elapsed_s() < self._spec.budget_s):
                self._windows.append((yield from self._window("as_is")))
        self._save()

    def _observe(self) -> Steps:
        """A look at the program as it is, for what no A/B shows: functions, the order of phases."""
        session = self._session
        session.show_progress("looking at the program as it is")
        session.reads, session.recorded = Counter(), []
        if session.on_gpu:
            session.clock.synchronize = torch.cuda.synchronize
        compiled = facts.num_compiled_frames()
        with Sampler(session.clock) as sampler:
            steps = WATCHED_SLOW_STEPS if self._steps == 1 else WATCHED_WINDOWS * self._steps
            window = yield from self._window("observed", steps=steps)
        self._seen, reads = session.recorded, dict(session.reads)
        session.clock.synchronize = session.recorded = session.reads = None
        self._optimizer_s = window.phases_s.get("optimizer", 0.0) / window.steps
        session.observed = {name: seconds / window.wall_s for name, seconds in window.phases_s.items()}
        compiled = facts.num_compiled_frames() - compiled
        observed = {**asdict(window), "samples": sampler.result(), "reads": reads, "compiled_frames": compiled}
        session.write(observed=observed, facts=facts.of_program(session))

    def _data(self) -> Steps:
        """As it is, against the same batches without the cost of getting them."""
        session = self._session
        if session.loader is None:
            session.notes.append("no DataLoader was seen: what the loop reads its data with can't be replaced")
        last: list[Any] = []
        for number in range(FIRST_ROUNDS):
            if number and not session.agree(self._has_time("data", DATA_UNTIL)):
                break
            last = yield from self._data_pair()
            self._seen += last if batches.num_bytes(self._seen) < LARGEST_SET_BYTES else []
        self._kept = batches.typical(self._seen, len(last)) if last else []
        self._save()

    def _data_pair(self) -> Generator[None, dict[str, float], list[Any]]:
        """A window as it is, and where it waits for data one over the same batches; gives the batches."""
        session = self._session
        begin_s = self._show("data")
        session.recorded = []
        before = yield from self._window("data")
        recorded, session.recorded = session.recorded, None
        recorded = recorded[-before.micro_batches :] if before.micro_batches else []
        self._windows.append(before)
        # On a CPU the phase says what waiting costs; on a GPU it may be hidden behind the step before.
        waits = session.on_gpu and session.observed.get("data", 0.0) > WORTH_REPLACING
        if session.agree(bool(recorded) and waits):
            after = yield from self._window("data", is_changed=True, over=recorded, steps=before.steps)
            self._compare("data", before, after)
        self._pair_s["data"] = time.perf_counter() - begin_s
        return recorded

    def _pair(self, name: str) -> Steps:
        """A window as it is and one with the change; neighbours in time are compared."""
        session, switch = self._session, self._switches[name]
        begin_s = self._show(name)
        before = yield from self._window(name, over=None if switch.reads_data else self._kept)
        session.mark(name)
        switch.turn(True)
        over = None if switch.reads_data else switch.seen or self._kept
        source = reread(session.loader, switch.num_workers) if switch.num_workers else None
        after = yield from self._window(
            name,
            is_changed=True,
            over=over,
            source=source,
            num_workers=switch.num_workers or None,
            steps=self._changed_steps.get(name, 0),
        )
        switch.turn(False)
        session.mark("")
        if not self._is_too_short(name, before, after):
            self._windows += [before, after]
            self._compare(name, before, after)
        self._pair_s[name] = time.perf_counter() - begin_s

    def _is_too_short(self, name: str, before: Window, after: Window) -> bool:
        """Whether a change makes so much of a step go that its first window is too short, and the next must be longer.

        Each window on a GPU begins with a device that waits for the host: of a short one that is a large part.
        """
        steps = min(round(after.steps * before.wall_s / after.wall_s), MOST_CHANGED_STEPS)
        if not self._session.on_gpu or name in self._changed_steps or self._switches[name].num_workers:
            return False
        if not self._session.agree(self._steps > 1 and steps >= MUCH_SHORTER * after.steps):
            return False
        self._changed_steps[name] = self._session.agree(steps)
        return True

    def _compare(self, name: str, before: Window, after: Window) -> None:
        """Add a pair, the seconds with the change for the work of the window before it."""
        switch, loader = self._switches.get(name, Switch()), self._session.loader
        before_s, after_s, ratio = before.steps_s, after.steps_s, 1.0
        if switch.seen and after.micro_batches:
            ratio = before.micro_batches / (after.micro_batches * self._work_ratio(switch.seen))
        else:
            ratio = before.steps / after.steps
        if name == "larger_micro_batch" and before.backward_passes > before.steps:
            # The global batch stays as it is: twice the samples take twice the steps of the optimizer.
            after_s = [seconds + self._optimizer_s * after.steps / len(after_s) for seconds in after_s]
        # Waiting for workers comes in bursts, at any step: where they read, only whole windows can be compared.
        if before.reads_data and (switch.num_workers or depth_of(loader)):
            (before_s,), (after_s,) = whole([before_s]), whole([after_s])
        pair: dict[str, Any] = {"before_s": before_s, "after_s": [seconds * ratio for seconds in after_s]}
        pair |= {"before_cpu_s": before.cpu_s, "after_cpu_s": after.cpu_s * ratio, "reads_data": before.reads_data}
        self._pairs.setdefault(name, []).append(pair)

    def _window(
        self,
        name: str,
        *,
        is_changed: bool = False,
        over: list[Any] | None = None,
        source: Iterator[Any] | None = None,
        num_workers: int | None = None,
        steps: int = 0,
    ) -> Measuring:
        """A window, after the queue of what it reads is as usual.

        Args:
            name: the probe.
            is_changed: with its change.
            over: batches to replay; None: the loop's own data, or `source`.
            source: what the loop reads in place of its own data.
            num_workers: of the source.
            steps: by default the usual number, or as many more as workers give at once.
        """
        session = self._session
        session.source = replay(over) if over else source
        if num_workers is None and session.loader is not None and session.source is None:
            num_workers = session.loader.num_workers
        depth = (num_workers or 0) * (getattr(session.loader, "prefetch_factor", None) or 2)
        # Of a loop that fetches ahead the first step is over a batch of the window before. Slow steps are spared it
        # where that batch is of the same kind.
        is_other = self._steps > 1 or over is not self._over
        self._over = over
        settle_steps = min(LONGEST_SETTLING, is_other + depth // self._per_step)
        steps = steps or self._whole_bursts(num_workers or 1)
        window = yield from measure(session, name, is_changed, steps, settle_steps)
        self._per_step = max(1, window.micro_batches // window.steps)
        session.source = None
        return window

    def _whole_bursts(self, num_workers: int) -> int:
        """Steps of a window: the workers of a loop that waits give their batches at about the same time."""
        burst = num_workers // math.gcd(num_workers, self._per_step)
        return self._steps if self._steps == 1 else min(-(-self._steps // burst) * burst, max(MOST_STEPS, self._steps))

    def _reading(self) -> list[dict[str, Any]]:
        """The program's functions that make batches, where workers make them.

        The last thing to do: workers that were started later would have the files that the dataset opens here.
        """
        session = self._session
        if not depth_of(session.loader) or session.observed.get("data", 0.0) < WORTH_REPLACING:
            return []
        session.show_progress("reading batches without workers")
        reading, until_s = reread(session.loader, 0), time.perf_counter() + READING_S
        sampler = Sampler(session.clock, below=len(own_frames(sys._getframe())))
        with sampler, session.clock.phase(phases.DATA), contextlib.suppress(Exception):
            while time.perf_counter() < until_s:
                next(reading)
        return sampler.result()

    def _work_ratio(self, seen: list[Any]) -> float:
        """Work of a micro batch of those, of a kept one."""
        work, kept = batches.mean_work(seen), batches.mean_work(self._kept)
        unit = "real_tokens" if kept["real_tokens"] else "samples"
        return work[unit] / kept[unit] if kept[unit] else 1.0

    def _saved(self, name: str) -> Interval:
        pairs = self._pairs[name]
        return saved_share(whole(pair["before_s"] for pair in pairs), whole(pair["after_s"] for pair in pairs))

    def _next(self) -> str:
        """The change to measure: of those that aren't known yet and for which there is time the least measured one."""
        names = [name for name in (*self._switches, "data") if self._is_open(name) and self._has_time(name, 1.0)]
        return min(names, key=self._rounds, default="")

    def _rounds(self, name: str) -> int:
        return sum(window.probe == name and not window.is_changed for window in self._windows)

    def _is_open(self, name: str) -> bool:
        """Whether more rounds may still show that a change saves time, or how much."""
        rounds = self._rounds(name)
        if rounds < 2 or name not in self._pairs:
            return rounds < ROUNDS
        saved = self._saved(name)
        if rounds < ROUNDS:
            return saved.high > WORTH_TELLING
        return rounds < MOST_ROUNDS and saved.value > WORTH_TELLING and saved.low < saved.value / 2

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _has_time(self, name: str, until: float) -> bool:
        """Whether another pair of a change fits into a part of the budget."""
        expected_s = self._pair_s.get(name) or max(self._pair_s.values(), default=0.0)
        return self._elapsed_s() + expected_s < until * self._spec.budget_s

    def _show(self, name: str) -> float:
        """Say what begins; gives the time."""
        number = self._rounds(name) + 1
        elapsed = f"{self._elapsed_s():.0f} of {self._spec.budget_s:.0f} s"
        self._session.show_progress(f"{elapsed}: measuring {name.replace('_', ' ')}, round {number}")
        return time.perf_counter()

    def _save(self, **more: Any) -> None:
        self._session.write(
            windows=list(map(asdict, self._windows)),
            pairs=self._pairs,
            why_not=self._why_not,
            switches={name: switch.detail for name, switch in self._switches.items()},
            kept=batches.mean_work(self._kept),
            seen=[batches.measure(batch) for batch in self._seen],
            measuring_s=self._elapsed_s(),
            **more,
        )


def _peak_memory_gib(session: Session) -> float:
    if session.on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
