"""What the diagnosing process asks of the training processes that it starts, as one JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pretrainkit import records

UNSET_VARIABLE = "PRETRAINKIT_DIAGNOSIS_UNSET"
"""Environment variable with names, divided by commas, that the program finds unset and can't set."""
SPEC_VARIABLE = "PRETRAINKIT_DIAGNOSIS"
"""Environment variable with the path of the file; without it the hooks do nothing."""

RESTARTED = ("debug_variables", "micro_batch")
"""Probes that start the program again."""
PROBES = (
    *("packing", "larger_micro_batch", "attention", "tf32", "threads"),
    *("anomaly_detection", "workers_2", "workers_4", "workers_8", "no_gradient_exchange", *RESTARTED),
)
"""What can be asked for or left out; the data probe is always made, since its batches are those of the others."""


@dataclass(frozen=True)
class Spec:
    """One measurement of one training program."""

    folder: str = ""
    """Where each rank writes rank_K.json; absolute."""
    speed_only: bool = False
    """Measure a few windows of the program as it is, and nothing else."""
    source: str = "script"
    """experiment, script or module."""
    num_cpus: int = 1
    """Cores that all ranks of this machine have together."""
    budget_s: float = 60.0
    """Time from the first step of one process to the end of its last window."""
    excluded: tuple[str, ...] = ()
    """Probes to leave out."""
    only: tuple[str, ...] = ()
    """If given, the probes to make, no others."""

    def wants(self, probe: str) -> bool:
        """Whether a probe is to be made."""
        return probe not in self.excluded and (not self.only or probe in self.only)


def read_spec() -> Spec | None:
    """The spec that this process was started with, if any."""
    path = os.environ.get(SPEC_VARIABLE)
    return records.decode(Spec, json.loads(Path(path).read_text(encoding="utf-8"))) if path else None
