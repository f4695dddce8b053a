"""From one rank's windows to what each probe has shown: how large a share of the step its change saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pretrainkit.diagnosis.statistics import Interval, Rounds, noise_of, saved_share, typical_s, undisturbed_s, whole

WORTH_TELLING = 0.02
"""A smaller share is 'fine'."""
CPU_WITNESS = 0.3
"""A change that saves work must save this part of its share in CPU time, too; waiting for others doesn't."""
SAVES_WORK = ("packing", "attention", "anomaly_detection", "deterministic", "recomputation", "micro_batch")
"""Probes whose change leaves less for the processor to do, so that on a CPU its time must fall."""

TRIES_WORKERS = ("workers_", "prefetch")
"""Probes that read by other workers."""


@dataclass(frozen=True)
class Shown:
    """What one probe has shown."""

    probe: str
    share: Interval
    """Of the step time as it is."""
    noise: float
    """Share that couldn't be told from nothing in these windows."""
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
            "noise": round(self.noise, 5),
            "rounds": self.rounds,
            "is_certain": self.is_certain,
            "doubt": self.doubt,
        }


def shown_by(probe: str, before_s: Rounds, after_s: Rounds) -> Shown:
    """What rounds without and with a change show by themselves."""
    share, noise, doubt = saved_share(before_s, after_s), noise_of(before_s), ""
    if share.low <= 0:
        doubt = "the windows don't agree that it saves time"
    elif share.value < noise:
        doubt = f"less than the machine's noise ({noise:.0%})"
    return Shown(probe, share, noise, len(before_s), doubt)


def step_s(window: dict[str, Any]) -> float:
    """Seconds of a step of a window."""
    return float(window["wall_s"] / window["steps"])


class Evidence:
    """One rank's windows, by probe."""

    def __init__(self, rank: dict[str, Any], *, confirmed_after: int) -> None:
        self.rank = rank
        self._confirmed_after = confirmed_after
        """Rounds from this number on were measured because the first ones had shown something."""
        self._windows: list[dict[str, Any]] = rank.get("windows", [])

    def windows(self, probe: str, *, is_changed: bool = True) -> list[dict[str, Any]]:
        """The windows of a probe."""
        return [window for window in self._windows if window["probe"] == probe and window["is_changed"] == is_changed]

    def as_is(self) -> list[dict[str, Any]]:
        """All windows of the program as it is, with its own data."""
        return [window for window in self._windows if not window["is_changed"] and window["probe"] != "as_is"]

    @property
    def as_is_step_s(self) -> Interval:
        """Seconds of a step as it is."""
        return typical_s([[step_s(window)] for window in self.as_is()])

    @property
    def replay_share(self) -> float:
        """Step time over kept batches as a share of the step time as it is."""
        data = self.windows("data")
        if not data:
            return 1.0
        before, after = self._sides(data)
        return min(1.0, undisturbed_s(after) / undisturbed_s(before))

    @property
    def noise(self) -> float:
        """Share that windows of one and the same setting differ by."""
        same = (self.windows(probe, is_changed=False) for probe in ("as_is", "data"))
        return min(noise_of([window["steps_s"] for window in windows]) for windows in same)

    def shown(self, probe: str) -> Shown | None:
        """What a probe has shown; None when it wasn't made."""
        windows = self.windows(probe)
        if not windows:
            return None
        is_of_kept_batches = probe in self.rank.get("switches", {})
        again = [window for window in windows if window["round"] >= self._confirmed_after and is_of_kept_batches]
        first = [window for window in windows if window not in again]
        used = again or first
        found = shown_by(probe, *self._normalised(probe, used))
        doubt = ""
        if found.doubt:
            doubt = found.doubt
        elif again and first and saved_share(*self._normalised(probe, first)).value <= 0:
            doubt = "seen once of two times"
        elif not again and is_of_kept_batches:
            doubt = "not measured a second time"
        elif self._lacks_witness(probe, used, found.share):
            doubt = "the CPU time is the same: something else on the machine took the time"
        factor = self.replay_share if is_of_kept_batches else 1.0
        return replace(found, share=found.share.scaled(factor), doubt=doubt)

    def _normalised(self, probe: str, windows: list[dict[str, Any]], *, cpu: bool = False) -> tuple[Rounds, Rounds]:
        """Seconds before and after for the same work, whatever the change puts into one micro batch."""
        before, after = self._sides(windows)
        if cpu:
            before = [[window["before_cpu_s"]] for window in windows]
            after = [[window["cpu_s"]] for window in windows]
        switches, kept = self.rank.get("switches", {}), self.rank.get("kept", {})
        if probe not in switches:
            return before, after
        unit = "real_tokens" if kept.get("real_tokens") else "samples"
        extra_s = [0.0] * len(windows)
        if probe.startswith("micro_batch_x"):
            unit = "samples"
            extra_s = [self._optimizer_steps_s(int(probe[-1]), window) for window in windows]
        ratios = []
        for window in windows:
            work_before = window["before_micro_batches"] * kept[unit]
            work_after = window["micro_batches"] * switches[probe][unit]
            ratios.append(work_before / work_after if work_before and work_after else 1.0)
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
        loader = self.rank.get("facts", {}).get("loader") or {}
        tries_workers = any(window["probe"].startswith(TRIES_WORKERS) for window in windows)
        replays = any(window["probe"] in self.rank.get("switches", {}) for window in windows)
        if tries_workers or (loader.get("num_workers") and not replays):
            return whole(before), whole(after)
        return before, after
