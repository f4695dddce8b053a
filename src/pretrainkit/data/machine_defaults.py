"""How many processes and how large batches suit this machine; the environment and flags go first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pretrainkit.errors import RequestError
from pretrainkit.units import format_bytes

WORKER_BYTES = 1 << 30
"""Memory to have for a worker: a large tokenizer's tables and caches take about half of it."""
SIZES = (
    # name, cores and memory from which it holds, sequences assembled at once, sequences in a record batch
    ("large", 64, 256 << 30, 16_384, 4_096),
    ("normal", 8, 32 << 30, 4_096, 1_024),
    ("small", 0, 0, 1_024, 256),
)


@dataclass(frozen=True)
class MachineSettings:
    """What a packing run uses."""

    num_proc: int
    """Processes that tokenise."""
    batch_size: int
    """Sequences that are assembled in memory at once."""
    writer_batch_size: int
    """Sequences in a record batch of the Arrow file."""
    told: str
    """Where each comes from, for the log."""


def machine_settings(
    environment: Mapping[str, str],
    *,
    num_proc: int | None = None,
    batch_size: int | None = None,
    writer_batch_size: int | None = None,
    cores: int | None = None,
    memory_bytes: int | None = None,
) -> MachineSettings:
    """Flags, else DATASET_NUM_PROC, DATASET_BATCH_SIZE and DATASET_WRITER_BATCH_SIZE, else the machine's size.

    Raises RequestError for a value that is no number above 0.
    """
    cores = cores or len(os.sched_getaffinity(0))
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name, _, _, batch, writer_batch = next(size for size in SIZES if cores >= size[1] and memory_bytes >= size[2])
    chosen, told = [], []
    for variable, flag, default in (
        ("DATASET_NUM_PROC", num_proc, max(1, min(cores, memory_bytes // WORKER_BYTES))),
        ("DATASET_BATCH_SIZE", batch_size, batch),
        ("DATASET_WRITER_BATCH_SIZE", writer_batch_size, writer_batch),
    ):
        given = environment.get(variable, "")
        value, origin = (
            (flag, "flag") if flag is not None else (given, "environment") if given else (default, "default")
        )
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            raise RequestError(f"{value!r}", where=variable, needed="a number above 0")
        chosen.append(number)
        told.append(f"{variable}={number} ({origin})")
    machine = f"{name} machine: {cores} cores, {format_bytes(memory_bytes)}"
    return MachineSettings(chosen[0], chosen[1], chosen[2], f"{machine}; {', '.join(told)}")
