"""From one rank's windows to what each probe has shown: how large a share of the step its change saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

from pretrainkit.diagnosis.observe.phases import PHASES
from pretrainkit.diagnosis.statistics import (
    MANY,
    Interval,
    Rounds,
    noise_of,
    saved_share,
    typical_s,
    undisturbed_s,
    whole,
)

WORTH_TELLING = 0.02
"""A smaller share is 'fine'."""
CPU_WITNESS = 0.3
"""A change that saves work must save this part of its share in CPU time, too; waiting for others doesn't."""
SAVES_WORK = ("packing", "attention", "anomaly_detection", "larger_micro_batch", "micro_batch")
"""Probes whose change leaves less for the processor to do, so that on a CPU its time must fall."""
LARGE = 0.1
"""A saving that is at least this large for certain needs no second measurement."""


@dataclass(frozen=True)
class Shown:
    """What one probe has shown."""

    probe: str
    share: Interval
    """Of the step time as it is."""
    noise: float | None
    """Share that these windows can't distinguish from nothing; None of few."""
    rounds: int
    doubt: str
    """Why the saving isn't certain; empty when it is larger than the noise, and was seen a second time."""

    @property
    def is_certain(self) -> bool:
        """Whether there is no doubt."""
        return not self.doubt

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "probe": self.probe,
            "share": self.share.to_json(),
            "noise": self.noise,
            "rounds": self.rounds,
            "is_certain": self.is_certain,
            "doubt": self.doubt,
        }


def shown_by(probe: str, before_s: Rounds, after_s: Rounds) -> Shown:
    """What rounds without and with a change show by themselves."""
    share, noise, doubt = saved_share(before_s, after_s), noise_of(before_s), ""
    if share.low <= 0:
        few = f"too few rounds ({len(before_s)}): --budget_s allows more" if len(before_s) < MANY else ""
        doubt = few or "the rounds don't agree that it saves time"
    elif noise and share.value < noise:
        doubt = f"less than the machine's noise ({noise:.0%})"
    return Shown(probe, share, noise, len(before_s), doubt)


def step_s(window: dict[str, Any]) -> float:
    """Seconds of a step of a window."""
    return float(window["wall_s"] / window["steps"])


class Evidence:
    """One rank's windows, by probe."""

    def __init__(self, rank: dict[str, Any]) -> None:
        self.rank = rank
        self._windows: list[dict[str, Any]] = rank.get("windows", [])

    def windows(self, probe: str, *, is_changed: bool = True) -> list[dict[str, Any]]:
        """The windows of a probe."""
        return [window for window in self._windows if window["probe"] == probe and window["is_changed"] == is_changed]

    def as_is(self) -> list[dict[str, Any]]:
        """All windows of the program as it is, with its own data."""
        return [window for window in self._windows if not window["is_changed"] and window["probe"] != "as_is"]

    def phases(self) -> list[dict[str, float]]:
        """Seconds of each phase, by window of the program as it is; on a GPU by step, with the device waited for."""
        if self.rank["facts"]["device"] == "cpu" and len(self.as_is()) >= MANY:
            return [window["phases_s"] for window in self.as_is()]
        return list(self.rank["observed"]["step_phases_s"])

    def phase_share(self, *names: str) -> Interval:
        """Part of the time that phases took together."""
        parts = [sum(spent.get(name, 0.0) for name in names) for spent in self.phases()]
        wholes = [sum(spent.get(name, 0.0) for name in PHASES) for spent in self.phases()]
        shares, value = [part / total for part, total in zip(parts, wholes, strict=True)], sum(parts) / sum(wholes)
        half = 1.96 * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 1.0
        return Interval(value, value - half, value + half).within_bounds()

    @property
    def as_is_step_s(self) -> Interval:
        """Seconds of a step as it is."""
        return typical_s([[step_s(window)] for window in self.as_is()])

    def data(self) -> Shown:
        """What reading the data takes: on a CPU the loop's waiting, on a GPU what ready-made batches save."""
        shown = self.shown("data")
        share = self.phase_share("data")
        doubt = "" if share.low >= WORTH_TELLING else "the windows don't agree that it waits"
        return shown or Shown("data", share, None, len(self.phases()), doubt)

    @property
    def replay_share(self) -> float:
        """Step time over kept batches as a share of the step time as it is."""
        data = self.windows("data")
        if not data:
            return 1.0 - self.phase_share("data").value
        before, after = self._sides(data)
        return min(1.0, undisturbed_s(after) / undisturbed_s(before))

    @property
    def noise(self) -> float | None:
        """Share that windows of one and the same setting differ by; None where there are too few."""
        same = (self.windows(probe, is_changed=False) for probe in ("as_is", "data"))
        found = [noise_of([window["steps_s"] for window in windows]) for windows in same]
        return min((noise for noise in found if noise is not None), default=None)

    def shown(self, probe: str) -> Shown | None:
        """What a probe has shown; None when it wasn't made."""
        windows = self.windows(probe)
        if not windows:
            return None
        is_of_kept_batches = probe not in self.rank["reading_probes"]
        screened = self.rank.get("switches", {}).get(probe, {}).get("screened", len(windows))
        again = [window for window in windows if window["round"] >= screened]
        first = [window for window in windows if window not in again]
        used = again if len(again) >= MANY else windows
        found = shown_by(probe, *self._normalised(probe, used))
        doubt = found.doubt
        if doubt:
            pass
        elif again and first and saved_share(*self._normalised(probe, first)).value <= 0:
            doubt = "seen once of two times"
        elif not again and found.share.low < LARGE and is_of_kept_batches:
            doubt = f"not measured a second time (after {len(first)} rounds): --budget_s allows more"
        elif self._lacks_witness(probe, used, found.share):
            doubt = "the CPU time is the same: something else on the machine took the time"
        share = found.share.scaled(self.replay_share) if is_of_kept_batches else found.share
        if probe == "packing":
            share = share.widened(self._padding_error())
        return replace(found, share=share, doubt=doubt)

    def _padding_error(self) -> float:
        """Of the mean share of padding, at 95%, since few batches were seen."""
        paddings = [1 - batch["real_tokens"] / batch["tokens"] for batch in self.rank["seen"] if batch["tokens"]]
        return 1.96 * stdev(paddings) / len(paddings) ** 0.5 if len(paddings) > 1 else 0.0

    def _normalised(self, probe: str, windows: list[dict[str, Any]], *, cpu: bool = False) -> tuple[Rounds, Rounds]:
        """Seconds before and after for the same work, whatever the change puts into one micro batch."""
        before, after = self._sides(windows)
        if cpu:
            before = [[window["before_cpu_s"]] for window in windows]
            after = [[window["cpu_s"]] for window in windows]
        switches = self.rank.get("switches", {})
        if probe not in switches:
            return before, after
        is_merged = probe == "larger_micro_batch"
        ratios = [
            window["before_micro_batches"] / (window["micro_batches"] * switches[probe]["work_ratio"])
            if window["before_micro_batches"] and window["micro_batches"]
            else 1.0
            for window in windows
        ]
        extra_s = [self._optimizer_steps_s(2, window) if is_merged else 0.0 for window in windows]
        after = [
            [(seconds + more_s / len(steps)) * ratio for seconds in steps]
            for steps, ratio, more_s in zip(after, ratios, extra_s, strict=True)
        ]
        return before, after

    def _optimizer_steps_s(self, factor: int, window: dict[str, Any]) -> float:
        """Seconds of the optimizer steps that larger micro batches don't save: the global batch stays as it is."""
        if self.micro_batches_per_step < 2:
            return 0.0
        observed = self.rank["observed"]
        optimizer_s = observed["phases_s"].get("optimizer", 0.0) / observed["steps"]
        return float(window["steps"] * (factor - 1) * optimizer_s)

    @property
    def micro_batches_per_step(self) -> float:
        """Backward passes of one optimizer step."""
        observed = self.rank["observed"]
        return float(observed["phases_s"].get("backward_passes", 0.0) / observed["steps"])

    def _lacks_witness(self, probe: str, windows: list[dict[str, Any]], share: Interval) -> bool:
        if self.rank.get("facts", {}).get("device", "cpu") != "cpu" or not probe.startswith(SAVES_WORK):
            return False
        cpu = saved_share(*self._normalised(probe, windows, cpu=True))
        return cpu.value < CPU_WITNESS * share.value

    def _sides(self, windows: list[dict[str, Any]]) -> tuple[Rounds, Rounds]:
        """Seconds of each step before and after the change, by round.

        Waiting for workers comes in bursts, at any step: where they read data, only whole windows can be compared.
        """
        before, after = [window["before_s"] for window in windows], [window["steps_s"] for window in windows]
        loader = self.rank["facts"]["loader"] or {}
        reads = any(window["probe"] in self.rank["reading_probes"] for window in windows)
        has_workers = loader.get("num_workers") or any(window["probe"].startswith("workers_") for window in windows)
        return (whole(before), whole(after)) if reads and has_workers else (before, after)
