"""Pinned host memory for the copies that saves make, ready before the first of them.

Megatron-core copies a GPU's tensors to pinned memory, which torch keeps for later copies of the same size. To pin
memory takes about a second for 1.3 GiB: the first save of a run would stop training for so long.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.units import format_bytes, format_duration

log = get_logger(__name__)


def copied_bytes(run: ResolvedRun, trainer: pl.Trainer) -> list[int]:
    """Bytes of each tensor that this rank copies from its GPU in a save; none where only a save tells.

    That is with data parallel ranks: they share out the weights then, and gather the optimizer's state in ordinary
    memory. The small tensors that tensor parallel ranks all have are counted on the first of them.
    """
    if run.data_parallel_size * run.config.parallel.context_parallel_size > 1:
        return []
    strategy: Any = trainer.strategy
    weights = strategy.megatron_parallel.sharded_state_dict()
    apply_factories(weights)
    states = 3 if run.config.optimizer.distributed or run.precision != "fp32" else 2
    sizes = []
    for item in nested_values(weights):
        if isinstance(item, ShardedTensor) and is_main_replica(item.replica_id):
            # Adam's two moments and the main parameters are in fp32.
            sizes += [item.data.nbytes, *[item.data.numel() * torch.float32.itemsize] * states]
    return sizes


class HostMemory:
    """Makes the memory in a thread, unless the first save comes before it."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._is_wanted = run.accelerator == "gpu"
        self._thread: threading.Thread | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin to make it, after a step; nothing the second time."""
        if self._is_wanted:
            self._is_wanted = False
            arguments = (copied_bytes(self._run, trainer), torch.cuda.current_device())
            self._thread = threading.Thread(target=make, args=arguments, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until it is made, before a save, which would make what is missing a second time."""
        self._is_wanted = False
        if self._thread:
            self._thread.join()


def make(sizes: list[int], device: int) -> None:
    """Let torch have pinned memory for tensors of so many bytes at once; `device`: the rank's GPU."""
    torch.cuda.set_device(device)  # of this thread
    began_s = time.monotonic()
    try:
        held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    except RuntimeError as error:
        log.warning("no host memory for the copies of saves yet: %s", str(error).partition("\n")[0])
        return
    del held  # torch keeps it
    log.info(
        "pinned host memory for saves: %s in %s", format_bytes(sum(sizes)), format_duration(time.monotonic() - began_s)
    )
