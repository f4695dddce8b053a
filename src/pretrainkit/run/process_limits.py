"""Limits of processes (`ulimit`) that would end a run: in the process group's start, or in its first save."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.machine import MIN_OPEN_FILES, process_limit
from pretrainkit.run.estimates import parameters
from pretrainkit.units import format_bytes

_WORKER_FILES = 8
"""Of a rank for each DataLoader worker: its queues and pipes (assumed)."""
_BYTES_PER_PARAMETER = 15
"""Of a checkpoint: in bf16 2 of weights and 12 of optimizer state, in fp32 12; and what stands around tensors."""


def limit_problems(run: ResolvedRun) -> Iterator[RequestError]:
    """The limits of this process, which ranks inherit, that are too low for a run."""
    needed_files = MIN_OPEN_FILES + _WORKER_FILES * run.config.data.num_workers
    open_files = process_limit(resource.RLIMIT_NOFILE)
    if open_files is not None and open_files < needed_files:
        yield RequestError(
            f"a process may open {open_files} files here (ulimit -n)",
            needed=f"{needed_files} or more",
            action="ulimit -n 4096 before the start, or ask the administrators for a higher limit",
            where="this machine",
        )
    file_bytes = process_limit(resource.RLIMIT_FSIZE)
    needed_bytes = parameters(run.model, run.padded_vocab_size) * _BYTES_PER_PARAMETER // run.world_size
    if file_bytes is not None and file_bytes < needed_bytes:
        yield RequestError(
            f"files may have {format_bytes(file_bytes)} here (ulimit -f)",
            needed=f"{format_bytes(needed_bytes)}, a rank's part of a checkpoint",
            action="ulimit -f unlimited before the start, or take the limit out of the job",
            where="this machine",
        )
