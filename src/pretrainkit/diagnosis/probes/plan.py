"""What is measured inside the program, in which order; every rank follows it step by step.

observe   the program as it is: phases, functions, batches; torch.profiler for a step or two
data      as it is, and on a GPU | the same batches again without reading them
screen    as it is | one change, for every change in turn, likely ones first, round after round
confirm   the changes that seemed to save time, with more rounds

The budget ends each stage at its part of the time, so that every change gets its windows, and each of them as many.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pretrainkit.diagnosis.observe import batches, facts, hooks, states
from pretrainkit.diagnosis.observe.profile import profile_steps
from pretrainkit.diagnosis.observe.sampler import Sampler
from pretrainkit.diagnosis.observe.session import Session
from pretrainkit.diagnosis.observe.streams import OtherLoader, depth_of, replay
from pretrainkit.diagnosis.observe.windows import Measuring, Steps, Window, measure, warm_up
from pretrainkit.diagnosis.probes import switches
from pretrainkit.diagnosis.probes.switches import Switch
from pretrainkit.diagnosis.spec import SPEED_ONLY, read_spec
from pretrainkit.diagnosis.statistics import Interval, saved_share, whole

WORTH_CONFIRMING = 0.025
"""Share of the time that a change must seem to save to be measured again."""
MOST_ROUNDS = 50
"""Of one change, on a machine that others use."""
WATCHED_WINDOWS, WATCHED_SLOW_STEPS = 4, 2
"""Length of the look at the program as it is: enough samples of its stack."""
WORTH_REPLACING = 0.01
"""Share of the time for data, as it was seen, from which the data is replaced to see what that saves."""
DATA_UNTIL, SCREEN_UNTIL = 0.3, 0.65
"""Parts of the budget at which a stage ends."""
SLOW_STEP = 1 / 40
"""Of the budget: steps that take longer are looked at one by one."""
LONGEST_SETTLING = 16
"""Steps that are let pass, at most, until a loader's queue is in its usual state."""


def install() -> None:
    """Begin to watch this process, if it was started by the diagnosis. Called right after torch is imported."""
    spec = read_spec()
    if spec:
        folder = Path(spec.folder)
        states.write(folder, states.IMPORTED)
        os.register_at_fork(after_in_child=partial(states.write, folder, states.IMPORTED))
        hooks.install(Session(spec, follow=lambda session: Plan(session).follow()))


class Plan:
    """The course of one rank's measurements."""

    def __init__(self, session: Session) -> None:
        self._session, self._spec = session, session.spec
        self._windows: list[dict[str, Any]] = []
        self._pairs: dict[str, list[tuple[list[float], list[float]]]] = {}
        self._pair_s: dict[str, float] = {}
        """Time that a pair of windows took, settling included."""
        self._steps = 2
        self._seen: list[Any] = []
        self._kept: list[Any] = []
        self._begin_s = time.perf_counter()
        self._why_not: dict[str, str] = {}
        self._switches: dict[str, Switch] = {}
        self._screened: dict[str, int] = {}
        """Rounds before a change was measured again."""

    def follow(self) -> Steps:
        """Measure all that the spec wants."""
        session = self._session
        self._steps = yield from warm_up(session, SLOW_STEP * self._spec.budget_s)
        if self._spec.plan == SPEED_ONLY:
            yield from self._speed()
            return
        yield from self._observe()
        yield from profile_steps(session, 1 if self._steps == 1 else 2)
        yield from self._data()
        share = self._saved("data").high if "data" in self._pairs else session.observed.get("data", 0.0)
        built, self._why_not = switches.build(session, self._kept, session.agree(share))
        self._switches = {name: built[name] for name in session.agree(list(built)) if name in built}
        yield from self._screen()
        again = session.agree([name for name in ("data", *self._switches) if self._seems_to_save(name)])
        while again and self._has_time(again[0], 1.0):
            yield from self._rounds(again, self._spec.confirming_rounds, 1.0)
            again = session.agree([name for name in again if self._is_open(name)])
        self._save(peak_memory_gib=_peak_memory_gib(session))
        if self._spec.time_checkpoint and self._spec.source == "experiment":
            session.time_the_checkpoint()

    def _speed(self) -> Steps:
        for number in range(self._spec.rounds):
            if number > 1 and not self._session.agree(self._elapsed_s() < self._spec.budget_s):
                break
            self._add((yield from self._measure("as_is", number)))
        self._save(environment=facts.environment())

    def _observe(self) -> Steps:
        """A look at the program as it is, for what no A/B shows: shapes, functions, the order of phases."""
        session = self._session
        session.show_progress("looking at the program as it is")
        session.loop.reads.clear()
        tokenizer = facts.tokenizer() or {}
        session.special_ids = {name: tokenizer.get(f"{name[:3]}_token_id") for name in ("eos_id", "bos_id")}
        session.measure_batches = session.is_watching_reads = True
        if session.on_gpu:
            session.clock.synchronize = torch.cuda.synchronize
        recompiled = facts.num_compiled_frames()
        with Sampler(session.clock) as sampler:
            steps = WATCHED_SLOW_STEPS if self._steps == 1 else WATCHED_WINDOWS * self._steps
            session.recorded = []
            window = yield from self._measure("observed", 0, steps=steps)
            self._seen, session.recorded = session.recorded, None
        session.clock.synchronize = None
        session.observed = {name: seconds / window.wall_s for name, seconds in window.phases_s.items()}
        session.measure_batches = session.is_watching_reads = False
        session.write(
            observed={
                **asdict(window),
                "samples": sampler.result(),
                "batches": session.batch_facts,
                "reads": dict(session.loop.reads),
                "compiled_frames": facts.num_compiled_frames() - recompiled,
            },
            facts=facts.of_program(session),
            environment=facts.environment(),
        )

    def _data(self) -> Steps:
        """As it is, against the same batches without the cost of getting them."""
        session = self._session
        if session.loop.loader is None:
            session.notes.append("no DataLoader was seen: what the loop reads its data with can't be replaced")
        last: list[Any] = []
        for number in range(self._spec.rounds):
            if number and not self._has_time("data", DATA_UNTIL):
                break
            last = yield from self._data_pair(number)
            self._seen += last if batches.num_bytes(self._seen) < session.largest_set_bytes else []
        self._kept = batches.typical(self._seen, len(last)) if last else []
        self._save()

    def _data_pair(self, number: int) -> Generator[None, dict[str, float], list[Any]]:
        """A window as it is, and where it waits for data one over the same batches; gives the batches."""
        session = self._session
        self._show("data", number)
        begin_s = time.perf_counter()
        session.recorded = []
        before = yield from self._measure("data", number)
        recorded, session.recorded = session.recorded, None
        self._add(before)
        recorded = recorded[-before.micro_batches :] if before.micro_batches else []
        # On a CPU the phase says what waiting costs; on a GPU it may be hidden behind the step before.
        waits = session.on_gpu and session.observed.get("data", 0.0) > WORTH_REPLACING
        if session.loop.loader is not None and session.agree(bool(recorded) and waits):
            self._add((yield from self._kept_window("data", recorded, number, is_changed=True)), before=before)
        self._pair_s["data"] = time.perf_counter() - begin_s
        return recorded

    def _screen(self) -> Steps:
        """Every change in turn; what can't save anything is dropped on the way."""
        for number in range(self._spec.rounds):
            names = [name for name in self._switches if number < 2 or self._may_save(name)]
            yield from self._rounds(self._session.agree(names), 1, SCREEN_UNTIL if number > 1 else 1.0)
        self._screened = {name: len(pairs) for name, pairs in self._pairs.items()}

    def _rounds(self, names: Iterable[str], rounds: int, until: float) -> Steps:
        """Pairs of windows of each change in turn."""
        names = list(names)
        for _ in range(rounds):
            for name in names:
                if not self._has_time(name, until):
                    continue
                if name == "data":
                    yield from self._data_pair(len(self._pairs[name]))
                else:
                    yield from self._pair(name, self._switches[name])
            self._save()

    def _pair(self, name: str, switch: Switch) -> Steps:
        """A window as it is and one with the change; neighbours in time are compared."""
        session, number = self._session, len(self._pairs.get(name, ()))
        self._show(name, number)
        begin_s = time.perf_counter()
        if switch.loader is not None or switch.reads_data:
            before = yield from self._measure(name, number)
        else:
            before = yield from self._kept_window("as_is", None, number)
        session.mark(name)
        if switch.loader is not None:
            after = yield from self._other_loader(name, switch.loader, number, before)
        else:
            switch.turn(True)
            if switch.reads_data:
                after = yield from self._measure(name, number, is_changed=True, settle_steps=1)
            else:
                after = yield from self._kept_window(name, switch.seen, number, is_changed=True)
            switch.turn(False)
        session.mark("")
        self._add(before)
        self._add(after, before=before)
        self._pair_s[name] = time.perf_counter() - begin_s

    def _kept_window(self, name: str, seen: list[Any] | None, number: int, *, is_changed: bool = False) -> Measuring:
        """A window over kept batches, or others that were made of them."""
        seen = seen or self._kept
        self._session.source = replay(seen) if seen else None
        settle_steps = 0 if self._steps == 1 else 1
        window = yield from self._measure(name, number, is_changed=is_changed, settle_steps=settle_steps)
        self._session.source = None
        return window

    def _other_loader(self, name: str, settings: dict[str, Any], number: int, before: Window) -> Measuring:
        """A window over the loop's data, read by another DataLoader."""
        self._session.source = other = OtherLoader(self._session.loop.loader, **settings)
        settle_steps = min(LONGEST_SETTLING, 1 + other.depth // max(1, before.micro_batches // before.steps))
        after = yield from self._measure(name, number, is_changed=True, settle_steps=settle_steps)
        self._session.source = None
        other.close()
        return after

    def _measure(
        self, name: str, number: int, *, is_changed: bool = False, steps: int = 0, settle_steps: int | None = None
    ) -> Measuring:
        """A window, by default of the usual length and after a loader's queue is in its usual state."""
        session, loader = self._session, self._session.loop.loader
        if settle_steps is None:
            per_step = max(1, session.micro_batches // max(self._steps, 1))
            depth = depth_of(loader) if loader is not None else 0
            settle_steps = min(LONGEST_SETTLING, (0 if self._steps == 1 else 1) + depth // per_step)
        return (yield from measure(session, name, number, is_changed, steps or self._steps, settle_steps))

    def _add(self, window: Window, before: Window | None = None) -> None:
        record = asdict(window)
        if before is not None:
            record |= {
                "before_s": before.steps_s,
                "before_cpu_s": before.cpu_s,
                "before_micro_batches": before.micro_batches,
            }
            self._pairs.setdefault(window.probe, []).append((before.steps_s, window.steps_s))
        self._windows.append(record)

    def _work_ratio(self, name: str) -> float:
        """Work of a micro batch with the change, of that without."""
        work, kept = batches.mean_work(self._switches[name].seen or self._kept), batches.mean_work(self._kept)
        unit = "real_tokens" if kept["real_tokens"] else "samples"
        return work[unit] / kept[unit] if kept[unit] else 1.0

    def _saved(self, name: str) -> Interval:
        ratio = self._work_ratio(name) if name in self._switches else 1.0
        before, after = zip(*self._pairs[name], strict=True)
        return saved_share(whole(before, ratio), whole(after))

    def _seems_to_save(self, name: str) -> bool:
        return len(self._pairs.get(name, ())) > 0 and self._saved(name).value > WORTH_CONFIRMING

    def _is_open(self, name: str) -> bool:
        """Whether more rounds may still show that a change saves time."""
        saved, rounds = self._saved(name), len(self._pairs[name])
        return rounds < MOST_ROUNDS and saved.value > WORTH_CONFIRMING and saved.low < saved.value / 2

    def _may_save(self, name: str) -> bool:
        return len(self._pairs.get(name, ())) < 2 or self._saved(name).high > WORTH_CONFIRMING

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _has_time(self, name: str, until: float) -> bool:
        """Whether another pair of a change fits into a part of the budget; all ranks agree."""
        expected_s = self._pair_s.get(name) or max(self._pair_s.values(), default=0.0)
        return bool(self._session.agree(self._elapsed_s() + expected_s < until * self._spec.budget_s))

    def _show(self, name: str, number: int) -> None:
        elapsed = f"{self._elapsed_s():.0f} of {self._spec.budget_s:.0f} s"
        self._session.show_progress(f"{elapsed}: measuring {name.replace('_', ' ')}, round {number + 1}")

    def _save(self, **more: Any) -> None:
        details = {
            name: {
                "detail": switch.detail,
                "work_ratio": self._work_ratio(name),
                "screened": self._screened.get(name, len(self._pairs.get(name, ()))),
            }
            for name, switch in self._switches.items()
        }
        of_data = [name for name, switch in self._switches.items() if switch.loader is not None or switch.reads_data]
        self._session.write(
            windows=self._windows,
            why_not=self._why_not,
            switches=details,
            reading_probes=["data", *of_data],
            kept=batches.mean_work(self._kept),
            seen=[batches.measure(batch) | {"lengths": []} for batch in self._seen],
            steps_per_window=self._steps,
            measuring_s=self._elapsed_s(),
            **more,
        )


def _peak_memory_gib(session: Session) -> float:
    if session.on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
