"""The changes of settings that are tried inside the running program: each is one thing, and can be taken back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis.session import batches, torch_switches
from pretrainkit.diagnosis.session.loop import Silenced
from pretrainkit.diagnosis.session.switch import WORTH_A_LOOK, Built, Switch, nothing

if TYPE_CHECKING:
    from pretrainkit.diagnosis.session.child import Session

LARGEST_MERGED_SHARE = 0.8
"""Of the GPU's memory that a larger micro batch may be expected to take."""


def build(session: Session, kept: list[Any]) -> dict[str, Built]:
    """All switches by name, for the program as it is now; `kept` are the batches that are replayed."""
    builders: dict[str, Callable[[], Built]] = {
        "packing": lambda: _packing(kept),
        **{f"micro_batch_x{factor}": partial(_merging, session, kept, factor) for factor in (2, 4)},
        "attention": lambda: torch_switches.attention(session),
        "tf32": lambda: torch_switches.tf32(session),
        "bf16": lambda: torch_switches.bf16(session),
        "fused_optimizer": lambda: torch_switches.fused_optimizer(session),
        "threads": lambda: _threads(session),
        "cpu_binding": lambda: _cpu_binding(session),
        "logging": lambda: _logging(session),
        "checkpoint_writes": lambda: _checkpoint_writes(session),
        "anomaly_detection": torch_switches.anomaly_detection,
        "deterministic": torch_switches.deterministic,
        "recomputation": lambda: torch_switches.recomputation(session),
        "compile": lambda: torch_switches.compile_layers(session),
    }
    built: dict[str, Built] = {}
    for name, builder in builders.items():
        try:
            built[name] = builder() if session.spec.wants(name) else "left out"
        except Exception as error:
            built[name] = f"can't be tried: {error}"
    return built


def _packing(kept: list[Any]) -> Built:
    if not kept or not any(batches.token_ids(batch) is not None for batch in kept):
        return "the loop's batches are no dicts with input_ids"
    if not any(batches.can_be_packed(batch) for batch in kept):
        return "no padding"
    seen = [batches.packed(batch) if batches.can_be_packed(batch) else batch for batch in kept]
    return Switch("packing", nothing, nothing, seen=seen)


def _merging(session: Session, kept: list[Any], factor: int) -> Built:
    if session.spec.source == "experiment":
        return "tried by starting the run with another micro_batch_size"
    if len(kept) < factor:
        return f"a window holds {len(kept)} micro batches"
    if not batches.can_be_merged(kept):
        return "the loop's batches can't be joined"
    if session.on_gpu:
        _, total = torch.cuda.mem_get_info()
        if torch.cuda.max_memory_allocated() * factor > LARGEST_MERGED_SHARE * total:
            return "too little GPU memory"
    groups = [kept[index : index + factor] for index in range(0, len(kept) - factor + 1, factor)]
    return Switch(f"micro_batch_x{factor}", nothing, nothing, seen=[batches.merged(group) for group in groups])


def _threads(session: Session) -> Built:
    now, cores = torch.get_num_threads(), session.num_cpus
    if now == cores:
        return f"{now} threads on {cores} cores"
    return Switch(
        "threads",
        lambda: torch.set_num_threads(cores),
        lambda: torch.set_num_threads(now),
        detail=f"{cores} threads instead of {now}",
    )


def _cpu_binding(session: Session) -> Built:
    if not hasattr(os, "sched_setaffinity"):
        return "can't be seen on this system"
    bound, cores = os.sched_getaffinity(0), set(session.spec.cpu_ids)
    threads = torch.get_num_threads()
    if len(bound) >= session.num_cpus or bound >= cores:
        return f"{len(bound)} cores"

    def bind(ids: set[int], num_threads: int) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), ids)
        torch.set_num_threads(num_threads)

    return Switch(
        "cpu_binding",
        lambda: bind(cores, max(threads, session.num_cpus)),
        lambda: bind(bound, threads),
        detail=f"{session.num_cpus} cores instead of {len(bound)}",
    )


KNOWN_LOGGERS = ("on_train_batch_end", "log", "add_scalar")
"""Names, in hooks.LATE, of functions that only log."""


def _logging(session: Session) -> Built:
    functions = Silenced(list(session.loop.loggers))
    if not session.loop.reads and not session.loop.loggers and session.spec.source != "experiment":
        return "the loop prints nothing and reads no value of a tensor"
    spent = session.observed.get("other", 0.0) + session.observed.get("logging", 0.0)
    if not session.on_gpu and spent < WORTH_A_LOOK:  # on a GPU the time for a read shows elsewhere
        return f"what the loop does between the phases takes {spent:.1%} of a step"

    def on() -> None:
        session.is_watching_reads = session.stale_reads = True
        session.silenced |= set(KNOWN_LOGGERS)
        functions.on()

    def off() -> None:
        functions.off()
        session.silenced -= set(KNOWN_LOGGERS)
        session.is_watching_reads = session.stale_reads = False

    return Switch("logging", on, off, detail="; ".join([*session.loop.loggers.values(), *session.loop.reads][:5]))


def _checkpoint_writes(session: Session) -> Built:
    if not session.saw_checkpoint_time:
        return "nothing was saved in the steps that were watched"
    names = {"save", "save_file", "_save", "_save_checkpoint"}

    def on() -> None:
        session.silenced |= names

    def off() -> None:
        session.silenced -= names

    return Switch("checkpoint_writes", on, off)


def no_gradient_exchange(session: Session) -> Built:
    """DistributedDataParallel without its all-reduce: every rank runs at its own speed."""
    from torch.nn.parallel import DistributedDataParallel

    modules = [root for root in session.seen_modules if isinstance(root, DistributedDataParallel)]
    if session.world_size == 1:
        return "one rank"
    if not modules:
        return "no DistributedDataParallel"

    def switch(value: bool) -> None:
        for module in modules:
            module.require_backward_grad_sync = value

    return Switch("no_gradient_exchange", lambda: switch(False), lambda: switch(True))
