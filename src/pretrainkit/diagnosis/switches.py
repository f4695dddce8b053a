"""The changes of settings that are tried inside the running program: each is one thing, and can be taken back."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis import batches
from pretrainkit.diagnosis.loop import Silenced
from pretrainkit.diagnosis.streams import Replay

if TYPE_CHECKING:
    from pretrainkit.diagnosis.child import Session

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
BETTER_KERNEL = 0.85
"""An attention kernel is tried when it takes at most this share of the time of the one in use."""
WORTH_A_LOOK = 0.02
"""Share of the step that a phase must take for its changes to be tried."""
LARGEST_MERGED_SHARE = 0.8
"""Of the GPU's memory that a larger micro batch may be expected to take."""


@dataclass(frozen=True)
class Switch:
    """A change: B windows are measured with it on, A windows with it off, over the same kept batches."""

    name: str
    on: Callable[[], None]
    off: Callable[[], None]
    seen: list[Any] | None = None
    """Batches to replay instead of the kept ones: the same samples arranged otherwise."""
    settle_steps: int = 1
    """Steps after switching on that aren't measured."""
    detail: str = ""
    """What exactly is changed, for the report."""


Built = Switch | str
"""A switch, or why it doesn't apply here."""


def nothing() -> None:
    """No change."""


def build(session: Session, kept: list[Any]) -> dict[str, Built]:
    """All switches by name, for the program as it is now; `kept` are the batches that are replayed."""
    builders: dict[str, Callable[[], Built]] = {
        "packing": lambda: _packing(kept),
        **{f"micro_batch_x{factor}": partial(_merging, session, kept, factor) for factor in (2, 4)},
        "attention": lambda: _attention(session),
        "tf32": lambda: _tf32(session),
        "bf16": lambda: _bf16(session),
        "fused_optimizer": lambda: _fused_optimizer(session),
        "threads": lambda: _threads(session),
        "cpu_binding": lambda: _cpu_binding(session),
        "logging": lambda: _logging(session),
        "checkpoint_writes": lambda: _checkpoint_writes(session),
        "anomaly_detection": _anomaly_detection,
        "deterministic": _deterministic,
        "recomputation": lambda: _recomputation(session),
        "compile": lambda: _compile(session),
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
    if len(kept) < factor or not batches.can_be_merged(kept):
        return "the loop's batches can't be joined"
    if session.on_gpu:
        _, total = torch.cuda.mem_get_info()
        if torch.cuda.max_memory_allocated() * factor > LARGEST_MERGED_SHARE * total:
            return "too little GPU memory"
    groups = [kept[index : index + factor] for index in range(0, len(kept) - factor + 1, factor)]
    return Switch(f"micro_batch_x{factor}", nothing, nothing, seen=[batches.merged(group) for group in groups])


def _attention(session: Session) -> Built:
    """The fastest kernel that runs on the loop's shapes, where another one is used."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    used = max(session.attention_kinds, key=lambda kind: session.attention_kinds[kind], default="")
    eager = [model for model in _transformers_models(session) if model.config._attn_implementation == "eager"]
    if not session.loop.attention and not eager:
        return f"attention is {used}" if used else "no attention was seen"
    times = {item["kernel"]: item["milliseconds"] for item in session.attention_alone if "milliseconds" in item}
    best = min(times, key=lambda kernel: times[kernel], default="")
    if used in times and times[best] > BETTER_KERNEL * times[used]:
        return f"{used}, the best that runs here" if used == best else f"{used}, as fast as {best}"
    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    allowed = [kinds[best]] if best in kinds else list(kinds.values())

    def on() -> None:
        session.attention_context = lambda: sdpa_kernel([*allowed, SDPBackend.MATH])
        for model in eager:
            model.config._attn_implementation = "sdpa"

    def off() -> None:
        session.attention_context = None
        for model in eager:
            model.config._attn_implementation = "eager"

    return Switch("attention", on, off, detail=f"{best or 'fused kernels'} instead of {used or 'eager'}")


def _transformers_models(session: Session) -> list[Any]:
    found = []
    for root in session.seen_modules:
        for module in (root, getattr(root, "module", None)):
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                found.append(module)
    return found


def _tf32(session: Session) -> Built:
    if not session.on_gpu:
        return "CUDA only"
    if torch.cuda.get_device_capability()[0] < 8:
        return "this GPU has no TF32"
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if before[0] != "highest":
        return "on already"

    def switch(precision: str, cudnn: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn

    return Switch("tf32", lambda: switch("high", True), lambda: switch(*before))


def _bf16(session: Session) -> Built:
    if not session.on_gpu:
        return "CUDA only"
    parameters = [parameter for root in session.seen_modules for parameter in root.parameters()]
    if not parameters or any(parameter.dtype != torch.float32 for parameter in parameters):
        return "the model is in 16 bits already"
    if torch.is_autocast_enabled("cuda") or session.loop.attention.get("dtype") in ("bfloat16", "float16"):
        return "on already"

    def on() -> None:
        session.forward_context = lambda: torch.autocast("cuda", torch.bfloat16)

    def off() -> None:
        session.forward_context = None

    return Switch("bf16", on, off)


def _fused_optimizer(session: Session) -> Built:
    optimizers = [item for item in session.loop.optimizers if type(item) in FUSED_OPTIMIZERS]
    groups = [group for item in optimizers for group in item.param_groups]
    if not groups:
        return "not one of torch's Adam, AdamW and SGD"
    if all(group.get("fused") for group in groups):
        return "on already"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return "not with differentiable or capturable"
    if session.observed.get("optimizer", 1.0) < WORTH_A_LOOK:
        return f"the optimizer takes {session.observed['optimizer']:.1%} of a step"
    before = [(group, group.get("fused"), group.get("foreach")) for group in groups]

    def move_steps(to_parameter: bool) -> None:
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if torch.is_tensor(state.get("step")):
                    state["step"] = state["step"].to(parameter.device if to_parameter else "cpu")

    def on() -> None:
        move_steps(True)
        for group, _, _ in before:
            group["fused"], group["foreach"] = True, False

    def off() -> None:
        move_steps(any(fused for _, fused, _ in before))
        for group, fused, foreach in before:
            group["fused"], group["foreach"] = fused, foreach

    return Switch("fused_optimizer", on, off)


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


def _anomaly_detection() -> Built:
    if not torch.is_anomaly_enabled():
        return "off"
    check_nan = torch.is_anomaly_check_nan_enabled()
    return Switch(
        "anomaly_detection",
        lambda: torch.autograd.set_detect_anomaly(False) and None,
        lambda: torch.autograd.set_detect_anomaly(True, check_nan) and None,
    )


def _deterministic() -> Built:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return Switch(
        "deterministic",
        lambda: torch.use_deterministic_algorithms(False),
        lambda: torch.use_deterministic_algorithms(True, warn_only=warn_only),
    )


def _recomputation(session: Session) -> Built:
    if not session.loop.checkpoint_calls:
        return "not used"
    if session.on_gpu:
        _, total = torch.cuda.mem_get_info()
        if torch.cuda.max_memory_allocated() > total / 3:
            return "too little GPU memory to try without it"

    def switch(value: bool) -> None:
        session.no_recomputation = value

    return Switch("recomputation", lambda: switch(True), lambda: switch(False))


def _compile(session: Session) -> Built:
    wanted = session.spec.compile
    if not (session.on_gpu if wanted is None else wanted):
        return "on CUDA, or with --compile"
    layers = _repeated_layers(session)
    if not layers:
        return "no list of equal layers in the model"
    if any(hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) for layer in layers):
        return "compiled already"
    plain = [layer.forward for layer in layers]
    compiled = [torch.compile(forward, dynamic=None) for forward in plain]

    def switch(forwards: list[Any]) -> None:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward

    return Switch("compile", lambda: switch(compiled), lambda: switch(plain), settle_steps=4)


def _repeated_layers(session: Session) -> list[Any]:
    """The longest list of modules of one class: a transformer's layers."""
    lists = [
        list(module)
        for root in session.seen_modules
        for module in root.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(layer) for layer in module}) == 1
    ]
    return max(lists, key=len, default=[])


class SetUp:
    """A switch and its batches, on for the length of a block."""

    def __init__(self, session: Session, switch: Switch | None, kept: list[Any]) -> None:
        self._session, self._switch, self._kept = session, switch, kept

    def __enter__(self) -> None:
        seen = self._switch.seen if self._switch and self._switch.seen else self._kept
        self._session.source = Replay(seen) if seen else None
        if self._switch:
            self._switch.on()

    def __exit__(self, *_: Any) -> None:
        if self._switch:
            self._switch.off()
        self._session.source = None


def work_of(seen: list[Any]) -> dict[str, float]:
    """Mean samples, tokens and real tokens of a micro batch of some batches."""
    facts = [batches.measure(batch) for batch in seen]
    return {
        name: math.fsum(fact[name] for fact in facts) / max(len(facts), 1)
        for name in ("samples", "tokens", "real_tokens")
    }


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


@contextlib.contextmanager
def ignoring_errors(notes: list[str], what: str):  # type: ignore[no-untyped-def]
    """Let a side measurement fail without ending the program."""
    try:
        yield
    except Exception as error:
        notes.append(f"{what}: {type(error).__name__}: {error}")
