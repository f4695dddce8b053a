"""From one rank's pairs of windows to what each probe has shown: how large a share of the step its change saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

from pretrainkit.diagnosis.observe.phases import PHASES
from pretrainkit.diagnosis.statistics import MANY, Interval, Rounds, saved_share, typical_s, undisturbed_s

WORTH_TELLING = 0.02
"""A smaller share is 'fine'."""
CPU_WITNESS = 0.3
"""A change that saves work must save this part of its share in CPU time, too; waiting for others doesn't."""
SAVES_WORK = ("packing", "attention", "anomaly_detection", "larger_micro_batch")
"""Probes whose change leaves less for the processor to do, so that on a CPU its time must fall."""
LARGE = 0.1
"""A saving that is at least this large for certain needs no more rounds."""


@dataclass(frozen=True)
class Shown:
    """What one probe has shown."""

    probe: str
    share: Interval
    """Of the step time as it is."""
    doubt: str
    """Why the saving isn't certain; empty when it is."""


def shown_by(probe: str, before_s: Rounds, after_s: Rounds) -> Shown:
    """What rounds without and with a change show by themselves."""
    share, doubt = saved_share(before_s, after_s), ""
    if share.low <= 0:
        few = f"too few rounds ({len(before_s)}): --budget_s allows more" if len(before_s) < MANY else ""
        doubt = few or "the rounds don't agree that it saves time"
    return Shown(probe, share, doubt)


def step_s(window: dict[str, Any]) -> float:
    """Seconds of a step of a window."""
    return float(window["wall_s"] / window["steps"])


class Evidence:
    """What one rank has measured."""

    def __init__(self, rank: dict[str, Any]) -> None:
        self.rank = rank

    def windows(self, probe: str) -> list[dict[str, Any]]:
        """The windows with a probe's change."""
        return [window for window in self.rank["windows"] if window["probe"] == probe and window["is_changed"]]

    def as_is(self) -> list[dict[str, Any]]:
        """All windows of the program as it is, with its own data."""
        return [window for window in self.rank["windows"] if window["reads_data"] and not window["is_changed"]]

    def phases(self) -> list[dict[str, float]]:
        """Seconds of each phase, by window of the program as it is; on a GPU by step, with the device waited for."""
        if self.rank["facts"]["device"] == "cpu" and len(self.as_is()) >= MANY:
            return [window["phases_s"] for window in self.as_is()]
        return list(self.rank["observed"]["step_phases_s"])

    def phase_share(self, name: str) -> Interval:
        """Part of the time that a phase took."""
        parts = [spent.get(name, 0.0) for spent in self.phases()]
        wholes = [sum(spent.get(phase, 0.0) for phase in PHASES) for spent in self.phases()]
        shares, value = [part / total for part, total in zip(parts, wholes, strict=True)], sum(parts) / sum(wholes)
        half = 1.96 * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 1.0
        return Interval(value, value - half, value + half).within_bounds()

    @property
    def as_is_step_s(self) -> Interval:
        """Seconds of a step as it is."""
        return typical_s([[step_s(window)] for window in self.as_is()])

    @property
    def micro_batches_per_step(self) -> float:
        """Backward passes of one optimizer step."""
        return float(self.rank["observed"]["backward_passes"] / self.rank["observed"]["steps"])

    def data(self) -> Shown:
        """What reading the data takes: on a CPU the loop's waiting, on a GPU what ready-made batches save."""
        shown = self.shown("data")
        share = self.phase_share("data")
        doubt = "" if share.low >= WORTH_TELLING else "the windows don't agree that it waits"
        return shown or Shown("data", share, doubt)

    def _replay_share(self) -> float:
        """Step time over kept batches as a share of the step time as it is."""
        if "data" not in self.rank["pairs"]:
            return 1.0 - self.phase_share("data").value
        before, after = _sides(self.rank["pairs"]["data"])
        return min(1.0, undisturbed_s(after) / undisturbed_s(before))

    def shown(self, probe: str) -> Shown | None:
        """What a probe has shown; None when it wasn't made."""
        pairs = self.rank["pairs"].get(probe)
        if not pairs:
            return None
        found, reads_data, half = shown_by(probe, *_sides(pairs)), pairs[0]["reads_data"], len(pairs) // 2
        doubt = found.doubt
        if doubt:
            pass
        elif half < MANY and found.share.low < LARGE and not reads_data:
            doubt = f"too few rounds to be sure ({len(pairs)}): --budget_s allows more"
        elif half >= MANY and any(saved_share(*_sides(part)).value <= 0 for part in (pairs[:half], pairs[half:])):
            doubt = "seen in one half of the rounds alone"
        elif self._lacks_witness(probe, pairs, found.share):
            doubt = "the CPU time is the same: something else on the machine took the time"
        share = found.share if reads_data else found.share.scaled(self._replay_share())
        if probe == "packing":
            share = share.widened(self._padding_error())
            # Fewer rows are also read in less time, by an amount that no window shows: all of it at most.
            share = replace(share, high=share.high + 1 - self._replay_share())
        return replace(found, share=share, doubt=doubt)

    def _padding_error(self) -> float:
        """Of the mean share of padding, at 95%, since few batches were seen."""
        paddings = [1 - batch["real_tokens"] / batch["tokens"] for batch in self.rank["seen"] if batch["tokens"]]
        return 1.96 * stdev(paddings) / len(paddings) ** 0.5 if len(paddings) > 1 else 0.0

    def _lacks_witness(self, probe: str, pairs: list[dict[str, Any]], share: Interval) -> bool:
        if self.rank["facts"]["device"] != "cpu" or probe not in SAVES_WORK:
            return False
        before, after = ([[pair[side]] for pair in pairs] for side in ("before_cpu_s", "after_cpu_s"))
        return saved_share(before, after).value < CPU_WITNESS * share.value


def _sides(pairs: list[dict[str, Any]]) -> tuple[Rounds, Rounds]:
    return [pair["before_s"] for pair in pairs], [pair["after_s"] for pair in pairs]
