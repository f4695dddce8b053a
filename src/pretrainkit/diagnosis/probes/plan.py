"""What is measured inside the program, in which order; every rank follows it step by step.

as it is      a look at phases, functions, batches; torch.profiler for two steps
data          as it is | the same batches again without reading them            alternating
compute       the same batches, as it is | one change | as it is | ...          alternating
again         the changes that seemed to save time, with more rounds
loader        other numbers of workers, prefetching, pinning: only where data takes time
ranks         gradients not exchanged, so that each rank shows its own speed
alone         the loader without the training; attention kernels on the shapes that were seen
"""

from __future__ import annotations

import os
import random
import resource
import time
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
from pretrainkit.diagnosis.probes import alone, switches
from pretrainkit.diagnosis.probes.switches import Switch
from pretrainkit.diagnosis.spec import SPEED_ONLY, read_spec
from pretrainkit.diagnosis.statistics import Interval, saved_share, whole

WORTH_CONFIRMING = 0.025
"""Share of the time that a change must seem to save to be measured again."""
WATCHED_WINDOWS = 4
"""Length, in windows, of the look at the program as it is: enough samples of its stack."""
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
        self._steps = 2
        self._kept: list[Any] = []
        self._begin_s = time.perf_counter()
        self._why_not: dict[str, str] = {}
        self._details: dict[str, dict[str, Any]] = {}

    def follow(self) -> Steps:
        """Measure all that the spec wants."""
        session = self._session
        self._steps = yield from warm_up(session)
        if self._spec.plan == SPEED_ONLY:
            for number in range(self._spec.rounds):
                self._add((yield from self._measure("as_is", number)))
            self._save(environment=facts.environment())
            return
        yield from self._observe()
        yield from profile_steps(session)
        yield from self._data()
        if session.loop.attention:
            with session.ignoring_errors("attention alone"):
                session.attention_alone = alone.time_attention(session)
        chosen, why_not = switches.build(session, self._kept)
        self._why_not |= why_not
        for name, switch in chosen.items():
            self._details[name] = {"detail": switch.detail, **batches.mean_work(switch.seen or self._kept)}
        yield from self._compute(chosen, self._spec.rounds)
        again = session.agree([name for name in chosen if self._seems_to_save(name)])
        yield from self._compute({name: chosen[name] for name in chosen if name in again}, self._spec.confirming_rounds)
        yield from self._loaders()
        yield from self._ranks()
        self._save(peak_memory_gib=_peak_memory_gib(session))
        alone.measure_alone(session)
        if self._spec.time_checkpoint and self._spec.source == "experiment":
            session.time_the_checkpoint()

    def _observe(self) -> Steps:
        """A look at the program as it is, for what no A/B tells: shapes, functions, the order of phases."""
        session = self._session
        session.loop.reads.clear()
        tokenizer = facts.tokenizer() or {}
        session.special_ids = {name: tokenizer.get(f"{name[:3]}_token_id") for name in ("eos_id", "bos_id")}
        session.measure_batches = session.is_watching_reads = True
        session.clock.events = []
        if session.on_gpu:
            session.clock.synchronize = torch.cuda.synchronize
        recompiled = facts.num_compiled_frames()
        with Sampler(session.clock) as sampler:
            window = yield from self._measure("observed", 0, steps=WATCHED_WINDOWS * self._steps)
        session.clock.synchronize = None
        events, session.clock.events = session.clock.events, None
        session.observed = {name: seconds / window.wall_s for name, seconds in window.phases_s.items()}
        session.measure_batches = session.is_watching_reads = False
        session.write(
            observed={
                **asdict(window),
                "samples": sampler.result(),
                "events": [(phase, round(begin, 6), round(end, 6)) for phase, begin, end in events[-400:]],
                "batches": session.batch_facts,
                "reads": dict(session.loop.reads),
                "loggers": list(session.loop.loggers.values()),
                "compiled_frames": facts.num_compiled_frames() - recompiled,
            },
            facts=facts.of_program(session),
            environment=facts.environment(),
        )

    def _data(self) -> Steps:
        """As it is, against the same batches without the cost of getting them."""
        session = self._session
        if session.loop.loader is None:
            session.notes.append("no DataLoader was seen: the time for data can't be told apart by replacing it")
        for number in range(self._spec.rounds + self._spec.confirming_rounds):
            if number >= 4 and not session.agree(self._has_time()):
                break
            if number >= self._spec.rounds and not session.agree(self._saved("data").high > WORTH_CONFIRMING):
                break
            session.recorded = []
            before = yield from self._measure("data", number)
            recorded, session.recorded = session.recorded, None
            self._add(before)
            self._kept = recorded[-before.micro_batches :] or self._kept
            if session.loop.loader is None or not session.agree(bool(recorded)):
                if number + 1 >= self._spec.rounds:
                    break
                continue
            self._add((yield from self._kept_window("data", Switch(), number)), before=before)
        self._save()

    def _compute(self, chosen: dict[str, Switch], rounds: int) -> Steps:
        """Kept batches as it is, and with one change each; neighbours in time are compared."""
        session = self._session
        order = random.Random(0)
        first = len(self._pairs.get(next(iter(chosen)), ())) if chosen else 0
        for number in range(first, first + rounds):
            if not chosen or (number - first >= 4 and not session.agree(self._has_time())):
                break
            before = yield from self._kept_window("as_is", None, number)
            self._add(before)
            for name in order.sample(list(chosen), len(chosen)):
                session.mark(name)
                changed = yield from self._kept_window(name, chosen[name], number)
                session.mark("")
                after = yield from self._kept_window("as_is", None, number)
                self._add(changed, before=before)
                self._add(after)
                before = after
            self._save()

    def _kept_window(self, name: str, switch: Switch | None, number: int) -> Measuring:
        """A window over kept batches, as it is or with a change."""
        seen = (switch and switch.seen) or self._kept
        self._session.source = replay(seen) if seen else None
        if switch is None:
            window = yield from self._measure(name, number, settle_steps=1)
        else:
            window = yield from self._changed(name, switch, number)
        self._session.source = None
        return window

    def _changed(self, name: str, switch: Switch, number: int) -> Measuring:
        """A window with a change."""
        switch.turn(True)
        settle_steps = switch.settle_steps if number == 0 else 1
        window = yield from self._measure(name, number, is_changed=True, settle_steps=settle_steps)
        switch.turn(False)
        return window

    def _loaders(self) -> Steps:
        """The loader's settings, one changed at a time, in the running loop."""
        session = self._session
        loader = session.loop.loader
        if not session.on_gpu:
            self._why_not["pinned_memory"] = "CUDA only"
        share = self._saved("data").value if "data" in self._pairs else 0.0
        if loader is None or not session.agree(share > WORTH_CONFIRMING):
            self._why_not["loader"] = "reading data takes no time that could be saved"
            return
        for name, changed in alone.loader_settings(session, loader).items():
            if not self._spec.wants(name):
                continue
            session.mark(name)
            for number in range(self._spec.rounds):
                before = yield from self._measure(name, number)
                session.source = other = OtherLoader(loader, **changed)
                settle_steps = min(LONGEST_SETTLING, 1 + other.depth // max(1, before.micro_batches // before.steps))
                after = yield from self._measure(name, number, is_changed=True, settle_steps=settle_steps)
                session.source = None
                other.close()
                self._add(before)
                self._add(after, before=before)
                if number >= 3 and not session.agree(self._has_time()):
                    break
            session.mark("")
        self._save()

    def _ranks(self) -> Steps:
        """Each rank at its own speed."""
        session = self._session
        if session.world_size == 1:
            return
        name, built = "no_gradient_exchange", switches.no_gradient_exchange(session)
        for number in range(self._spec.rounds + 2):
            before = yield from self._measure(name, number)
            self._add(before)
            if isinstance(built, Switch):
                self._add((yield from self._changed(name, built, number)), before=before)
        if isinstance(built, str):
            self._why_not[name] = built
        self._save()

    def _measure(
        self, name: str, number: int, *, is_changed: bool = False, steps: int = 0, settle_steps: int = 0
    ) -> Measuring:
        """A window, by default of the usual length and after a loader's queue is in its usual state."""
        session, loader = self._session, self._session.loop.loader
        if not settle_steps:
            per_step = max(1, session.micro_batches // max(self._steps, 1))
            settle_steps = min(LONGEST_SETTLING, 1 + (depth_of(loader) if loader is not None else 0) // per_step)
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

    def _seems_to_save(self, name: str) -> bool:
        pairs = self._pairs.get(name, [])
        if len(pairs) < 2:
            return False
        before, after = zip(*pairs, strict=True)
        detail, kept = self._details[name], batches.mean_work(self._kept)
        unit = "real_tokens" if kept["real_tokens"] else "samples"
        # Per micro batch; both windows have as many of them.
        ratio = detail[unit] / kept[unit] if kept[unit] else 1.0
        return saved_share([[step_s * ratio for step_s in window] for window in before], after).value > WORTH_CONFIRMING

    def _saved(self, name: str) -> Interval:
        """By whole windows, for probes that read data."""
        before, after = zip(*self._pairs[name], strict=True)
        return saved_share(whole(before), whole(after))

    def _has_time(self) -> bool:
        return time.perf_counter() - self._begin_s < self._spec.budget_s

    def _save(self, **more: Any) -> None:
        self._session.write(
            windows=self._windows,
            why_not=self._why_not,
            switches=self._details,
            kept=batches.mean_work(self._kept),
            steps_per_window=self._steps,
            epochs_begun=self._session.epochs_begun,
            **more,
        )


def _peak_memory_gib(session: Session) -> float:
    if session.on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
