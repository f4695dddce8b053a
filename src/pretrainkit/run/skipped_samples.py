"""Samples that a run leaves out since it has gone back to a checkpoint before them: --on_bad_loss rollback.

skipped_samples.json of an experiment has one entry for each rollback. Used samples are counted without those that are
left out, so that step, sample and learning rate are those of a run whose data never had them. All of a rollback's
samples come after the newest checkpoint: a range that is added moves no checkpoint's position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.files import same_fingerprint
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import RunFolder


@dataclass(frozen=True)
class SkippedSamples:
    """Samples of a run's order that are left out."""

    ranges: tuple[tuple[int, int], ...] = ()
    """First and last of each range, ascending."""
    num_rollbacks: int = 0
    """Rollbacks of the run so far, on any data."""

    @property
    def count(self) -> int:
        """How many samples are left out."""
        return sum(last - first + 1 for first, last in self.ranges)

    def place(self, position: int) -> int:
        """The sample, in the order of all, that is number `position` (from 0) of those that are not left out."""
        for first, last in self.ranges:
            if position < first:
                break
            position += last - first + 1
        return position

    def places(self, positions: Iterable[int]) -> list[int]:
        """`place` of each position."""
        return [self.place(position) for position in positions]


NOTHING_SKIPPED = SkippedSamples()


def read_skipped(run: ResolvedRun) -> SkippedSamples:
    """What the next start of a run leaves out of its present data."""
    entries = _entries(run)
    ranges = [pair for entry in entries if _is_of_data(entry, run) for pair in entry["ranges"]]
    return SkippedSamples(tuple(sorted((first, last) for first, last in ranges)), len(entries))


def add_skipped(run: ResolvedRun, samples: list[int], *, step: int) -> None:
    """Record that the run goes back from the bad step `step` and leaves `samples` out, which ascend."""
    runs = itertools.groupby(enumerate(samples), lambda pair: pair[1] - pair[0])
    parts = [[sample for _, sample in group] for _, group in runs]
    entry = {"step": step, "ranges": [[part[0], part[-1]] for part in parts], **_data(run)}
    files.write_json(RunFolder.of(run).skipped_samples, {"rollbacks": [*_entries(run), entry]})


def _entries(run: ResolvedRun) -> list[dict[str, Any]]:
    """Those of the run, or of its parent while it is a branch without a checkpoint."""
    folder = RunFolder.of(run)
    if run.branch and not folder.skipped_samples.exists() and not newest_committed(folder.checkpoints):
        folder = RunFolder(Path(run.branch.experiment))
    content = files.read_json(folder.skipped_samples) if folder.skipped_samples.exists() else {"rollbacks": []}
    entries: list[dict[str, Any]] = content["rollbacks"]
    return entries


def _data(run: ResolvedRun) -> dict[str, Any]:
    return {"data_hash": run.dataset.data_hash, "weights": list(run.dataset.weights)}


def _is_of_data(entry: dict[str, Any], run: ResolvedRun) -> bool:
    """Whether an entry counts the samples of the run's data: not after --allow_data_change."""
    return same_fingerprint(entry["data_hash"], run.dataset.data_hash) and entry["weights"] == list(run.dataset.weights)
