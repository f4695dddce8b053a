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

import random
import resource
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis.session import alone, facts, switches
from pretrainkit.diagnosis.session.profile import profile_steps
from pretrainkit.diagnosis.session.sampler import Sampler
from pretrainkit.diagnosis.session.streams import OtherLoader, Replay, depth_of
from pretrainkit.diagnosis.session.switch import SetUp, Switch, ignoring_errors, work_of
from pretrainkit.diagnosis.session.windows import Steps, Window, measure, warm_up
from pretrainkit.diagnosis.spec import SPEED_ONLY
from pretrainkit.diagnosis.statistics import Interval, saved_share, whole

if TYPE_CHECKING:
    from pretrainkit.diagnosis.session.child import Session

WORTH_CONFIRMING = 0.025
"""Share of the time that a change must seem to save to be measured again."""
WATCHED_WINDOWS = 4
"""Length, in windows, of the look at the program as it is: enough samples of its stack."""
LONGEST_SETTLING = 16
"""Steps that are let pass, at most, until a loader's queue is in its usual state."""


def make_plan(session: Session) -> Steps:
    """The plan that the spec asks for."""
    return Plan(session).follow()


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
            yield from self._speed_only()
            return
        yield from self._observe()
        yield from profile_steps(session)
        yield from self._data()
        if session.loop.attention:
            with ignoring_errors(session.notes, "attention alone"):
                session.attention_alone = alone.time_attention(session)
        built = switches.build(session, self._kept)
        chosen = [item for item in built.values() if isinstance(item, Switch)]
        self._why_not |= {name: item for name, item in built.items() if isinstance(item, str)}
        for switch in chosen:
            self._details[switch.name] = {"detail": switch.detail, **work_of(switch.seen or self._kept)}
        yield from self._compute(chosen, self._spec.rounds)
        again = session.agree([switch.name for switch in chosen if self._seems_to_save(switch.name)])
        yield from self._compute([item for item in chosen if item.name in again], self._spec.confirming_rounds)
        yield from self._loaders()
        yield from self._ranks()
        self._save(peak_memory_gib=_peak_memory_gib(session))
        alone.measure_alone(session)
        if self._spec.time_checkpoint and self._spec.source == "experiment":
            session.time_the_checkpoint()

    def _speed_only(self) -> Steps:
        for number in range(self._spec.rounds):
            window = yield from self._as_is("as_is", number, self._settling())
            self._add(window)
        self._save(environment=facts.environment())

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
        steps = WATCHED_WINDOWS * self._steps
        recompiled = facts.num_compiled_frames()
        with Sampler(session.clock) as sampler:
            window = yield from measure(
                session, "observed", is_changed=False, number=0, steps=steps, settle_steps=self._settling()
            )
        session.clock.synchronize = None
        events, session.clock.events = session.clock.events, None
        session.observed = {name: seconds / window.wall_s for name, seconds in window.phases_s.items()}
        session.measure_batches = session.is_watching_reads = False
        session.write(
            observed={
                **window.to_json(),
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
            if number >= self._spec.rounds and not session.agree(self._may_save("data")):
                break
            session.recorded = []
            before = yield from self._as_is("data", number, self._settling())
            recorded, session.recorded = session.recorded, None
            self._add(before)
            self._kept = recorded[-before.micro_batches :] or self._kept
            if session.loop.loader is None or not session.agree(bool(recorded)):
                if number + 1 >= self._spec.rounds:
                    break
                continue
            session.source = Replay(self._kept) if self._kept else None
            after = yield from measure(
                session, "data", is_changed=True, number=number, steps=self._steps, settle_steps=1
            )
            session.source = None
            self._add(after, before=before)
        self._save()

    def _compute(self, chosen: list[Switch], rounds: int) -> Steps:
        """Kept batches as it is, and with one change each; neighbours in time are compared."""
        session = self._session
        order = random.Random(0)
        first = len(self._pairs.get(chosen[0].name, ())) if chosen else 0
        for number in range(first, first + rounds):
            if not chosen or (number - first >= 4 and not session.agree(self._has_time())):
                break
            before = yield from self._kept_window("as_is", None, number)
            self._add(before)
            for switch in order.sample(chosen, len(chosen)):
                session.mark(switch.name)
                changed = yield from self._kept_window(switch.name, switch, number)
                session.mark("")
                after = yield from self._kept_window("as_is", None, number)
                self._add(changed, before=before)
                self._add(after)
                before = after
            self._save()

    def _kept_window(self, name: str, switch: Switch | None, number: int) -> Generator[None, dict[str, float], Window]:
        settle_steps = switch.settle_steps if switch and number == 0 else 1
        with SetUp(self._session, switch, self._kept):
            return (
                yield from measure(
                    self._session,
                    name,
                    is_changed=switch is not None,
                    number=number,
                    steps=self._steps,
                    settle_steps=settle_steps,
                )
            )

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
                before = yield from self._as_is(name, number, self._settling())
                other = OtherLoader(loader, **changed)
                session.source = other
                settle = min(LONGEST_SETTLING, 1 + other.depth // self._micro_batches(before))
                after = yield from measure(
                    session, name, is_changed=True, number=number, steps=self._steps, settle_steps=settle
                )
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
        built = switches.no_gradient_exchange(session)
        rounds = self._spec.rounds + 2
        for number in range(rounds):
            before = yield from self._as_is("no_gradient_exchange", number, self._settling())
            self._add(before)
            if isinstance(built, Switch):
                built.on()
                after = yield from measure(
                    session, built.name, is_changed=True, number=number, steps=self._steps, settle_steps=1
                )
                built.off()
                self._add(after, before=before)
        if isinstance(built, str):
            self._why_not["no_gradient_exchange"] = built
        self._save()

    def _as_is(self, name: str, number: int, settle_steps: int) -> Generator[None, dict[str, float], Window]:
        return (
            yield from measure(
                self._session, name, is_changed=False, number=number, steps=self._steps, settle_steps=settle_steps
            )
        )

    def _settling(self) -> int:
        loader = self._session.loop.loader
        depth = depth_of(loader) if loader is not None else 0
        per_step = max(1, self._session.micro_batches // max(self._steps, 1))
        return min(LONGEST_SETTLING, 1 + depth // per_step)

    @staticmethod
    def _micro_batches(window: Window) -> int:
        return max(1, window.micro_batches // window.steps)

    def _add(self, window: Window, before: Window | None = None) -> None:
        record = window.to_json()
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
        detail, kept = self._details[name], work_of(self._kept)
        unit = "real_tokens" if kept["real_tokens"] else "samples"
        # Per micro batch; both windows have as many of them.
        ratio = detail[unit] / kept[unit] if kept[unit] else 1.0
        return saved_share([[step_s * ratio for step_s in window] for window in before], after).value > WORTH_CONFIRMING

    def _saved(self, name: str) -> Interval:
        """By whole windows, for probes that read data."""
        before, after = zip(*self._pairs[name], strict=True)
        return saved_share(whole(before), whole(after))

    def _may_save(self, name: str) -> bool:
        return self._saved(name).high > WORTH_CONFIRMING

    def _has_time(self) -> bool:
        return time.perf_counter() - self._begin_s < self._spec.budget_s

    def _save(self, **more: Any) -> None:
        kept_work = work_of(self._kept)
        self._session.write(
            windows=self._windows,
            why_not=self._why_not,
            switches=self._details,
            kept=kept_work,
            steps_per_window=self._steps,
            epochs_begun=self._session.epochs_begun,
            **more,
        )


def _peak_memory_gib(session: Session) -> float:
    if session.on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
