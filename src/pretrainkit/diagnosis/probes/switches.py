"""The changes of settings that are tried inside the running program: each is one thing, and can be taken back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis.observe import batches
from pretrainkit.diagnosis.observe.loop import Silenced

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

WORTH_A_LOOK = 0.02
"""Share of the step that a phase must take for its changes to be tried."""
LARGEST_MERGED_SHARE = 0.8
"""Of the GPU's memory that a larger micro batch may be expected to take."""
FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
BETTER_KERNEL = 0.85
"""An attention kernel is tried when it takes at most this share of the time of the one in use."""
KNOWN_LOGGERS = frozenset(["on_train_batch_end", "log", "add_scalar"])
"""Names, in hooks.LATE, of functions that only log."""
SAVERS = frozenset(["save", "save_file", "_save", "_save_checkpoint"])
"""The same of functions that save."""


@dataclass(frozen=True)
class Switch:
    """A change: B windows are measured with it on, A windows with it off, over the same kept batches."""

    turn: Callable[[bool], object] = lambda is_on: None
    """Makes the change, or takes it back."""
    seen: list[Any] | None = None
    """Batches to replay instead of the kept ones: the same samples arranged otherwise."""
    settle_steps: int = 1
    """Steps after switching on that aren't measured."""
    detail: str = ""
    """What exactly is changed, for the report."""


Built = Switch | str
"""A switch, or why it doesn't apply here."""


def build(session: Session, kept: list[Any]) -> tuple[dict[str, Switch], dict[str, str]]:
    """Switches for the program as it is now, and why others don't apply; `kept` are the batches that are replayed."""
    builders: dict[str, Callable[[], Built]] = {
        "packing": partial(_packing, kept),
        **{f"micro_batch_x{factor}": partial(_merging, session, kept, factor) for factor in (2, 4)},
        "attention": partial(_attention, session),
        "tf32": partial(_tf32, session),
        "bf16": partial(_bf16, session),
        "fused_optimizer": partial(_fused_optimizer, session),
        "threads": partial(_threads, session),
        "cpu_binding": partial(_cpu_binding, session),
        "logging": partial(_logging, session),
        "checkpoint_writes": partial(_checkpoint_writes, session),
        "anomaly_detection": _anomaly_detection,
        "deterministic": _deterministic,
        "recomputation": partial(_recomputation, session),
        "compile": partial(_compile, session),
    }
    built: dict[str, Built] = {}
    for name, builder in builders.items():
        try:
            built[name] = builder() if session.spec.wants(name) else "left out"
        except Exception as error:
            built[name] = f"can't be tried: {error}"
    return (
        {name: item for name, item in built.items() if isinstance(item, Switch)},
        {name: item for name, item in built.items() if isinstance(item, str)},
    )


def _packing(kept: list[Any]) -> Built:
    if not any(batches.token_ids(batch) is not None for batch in kept):
        return "the loop's batches are no dicts with input_ids"
    if not any(batches.can_be_packed(batch) for batch in kept):
        return "no padding"
    return Switch(seen=[batches.packed(batch) if batches.can_be_packed(batch) else batch for batch in kept])


def _merging(session: Session, kept: list[Any], factor: int) -> Built:
    if session.spec.source == "experiment":
        return "tried by starting the run with another micro_batch_size"
    if len(kept) < factor:
        return f"a window holds {len(kept)} micro batches"
    if not batches.can_be_merged(kept):
        return "the loop's batches can't be joined"
    if session.on_gpu and _used_gpu_memory() * factor > LARGEST_MERGED_SHARE:
        return "too little GPU memory"
    groups = [kept[index : index + factor] for index in range(0, len(kept) - factor + 1, factor)]
    return Switch(seen=[batches.merged(group) for group in groups])


def _used_gpu_memory() -> float:
    """Share of the GPU's memory that the program has taken at most."""
    return torch.cuda.max_memory_allocated() / torch.cuda.mem_get_info()[1]


def _attention(session: Session) -> Built:
    """The fastest kernel that runs on the loop's shapes, where another one is used."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    used = max(session.attention_kinds, key=lambda kind: session.attention_kinds[kind], default="")
    models = [model for root in session.seen_modules for model in (root, getattr(root, "module", None))]
    configs = [getattr(model, "config", None) for model in models]
    eager: list[Any] = [config for config in configs if getattr(config, "_attn_implementation", None) == "eager"]
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
    allowed = [*([kinds[best]] if best in kinds else kinds.values()), SDPBackend.MATH]

    def turn(is_on: bool) -> None:
        session.attention_context = partial(sdpa_kernel, allowed) if is_on else contextlib.nullcontext
        for config in eager:
            config._attn_implementation = "sdpa" if is_on else "eager"

    return Switch(turn, detail=f"{best or 'fused kernels'} instead of {used or 'eager'}")


def _tf32(session: Session) -> Built:
    """float32 matrix products on tensor cores."""
    if not session.on_gpu:
        return "CUDA only"
    if torch.cuda.get_device_capability()[0] < 8:
        return "this GPU has no TF32"
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if precision != "highest":
        return "on already"

    def turn(is_on: bool) -> None:
        torch.set_float32_matmul_precision("high" if is_on else precision)
        torch.backends.cudnn.allow_tf32 = is_on or cudnn

    return Switch(turn)


def _bf16(session: Session) -> Built:
    """The forward pass under autocast."""
    if not session.on_gpu:
        return "CUDA only"
    parameters = [parameter for root in session.seen_modules for parameter in root.parameters()]
    if not parameters or any(parameter.dtype != torch.float32 for parameter in parameters):
        return "the model is in 16 bits already"
    if torch.is_autocast_enabled("cuda") or session.loop.attention.get("dtype") in ("bfloat16", "float16"):
        return "on already"
    autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    return Switch(lambda is_on: setattr(session, "forward_context", autocast if is_on else contextlib.nullcontext))


def _fused_optimizer(session: Session) -> Built:
    """The optimizer's step in one kernel."""
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
    before = [(group.get("fused"), group.get("foreach")) for group in groups]

    def turn(is_on: bool) -> None:
        of_groups = [(True, False)] * len(groups) if is_on else before
        on_device = any(fused for fused, _ in of_groups)
        for parameter, state in [item for optimizer in optimizers for item in optimizer.state.items()]:
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(parameter.device if on_device else "cpu")
        for group, (fused, foreach) in zip(groups, of_groups, strict=True):
            group["fused"], group["foreach"] = fused, foreach

    return Switch(turn)


def _threads(session: Session) -> Built:
    now, cores = torch.get_num_threads(), session.num_cpus
    if now == cores:
        return f"{now} threads on {cores} cores"
    detail = f"{cores} threads instead of {now}"
    return Switch(lambda is_on: torch.set_num_threads(cores if is_on else now), detail=detail)


def _cpu_binding(session: Session) -> Built:
    if not hasattr(os, "sched_setaffinity"):
        return "can't be seen on this system"
    bound, cores = os.sched_getaffinity(0), set(session.spec.cpu_ids)
    threads = torch.get_num_threads()
    if len(bound) >= session.num_cpus or bound >= cores:
        return f"{len(bound)} cores"

    def turn(is_on: bool) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores if is_on else bound)
        torch.set_num_threads(max(threads, session.num_cpus) if is_on else threads)

    return Switch(turn, detail=f"{session.num_cpus} cores instead of {len(bound)}")


def _logging(session: Session) -> Built:
    functions = Silenced(list(session.loop.loggers))
    if not session.loop.reads and not session.loop.loggers and session.spec.source != "experiment":
        return "the loop prints nothing and reads no value of a tensor"
    spent = session.observed.get("other", 0.0) + session.observed.get("logging", 0.0)
    if not session.on_gpu and spent < WORTH_A_LOOK:  # on a GPU the time for a read shows elsewhere
        return f"what the loop does between the phases takes {spent:.1%} of a step"

    def turn(is_on: bool) -> None:
        session.is_watching_reads = session.stale_reads = is_on
        session.silenced = KNOWN_LOGGERS if is_on else frozenset()
        functions.turn(is_on)

    return Switch(turn, detail="; ".join([*session.loop.loggers.values(), *session.loop.reads][:5]))


def _checkpoint_writes(session: Session) -> Built:
    if not session.saw_checkpoint_time:
        return "nothing was saved in the steps that were watched"
    return Switch(lambda is_on: setattr(session, "silenced", SAVERS if is_on else frozenset()))


def _anomaly_detection() -> Built:
    """Without autograd's search for NaN."""
    if not torch.is_anomaly_enabled():
        return "off"
    check_nan = torch.is_anomaly_check_nan_enabled()
    return Switch(lambda is_on: torch.autograd.set_detect_anomaly(not is_on, check_nan))


def _deterministic() -> Built:
    """With whatever algorithm is fastest."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return Switch(lambda is_on: torch.use_deterministic_algorithms(not is_on, warn_only=warn_only))


def _recomputation(session: Session) -> Built:
    """Activations kept for the backward pass."""
    if not session.loop.checkpoint_calls:
        return "not used"
    if session.on_gpu and _used_gpu_memory() > 1 / 3:
        return "too little GPU memory to try without it"
    return Switch(partial(setattr, session, "no_recomputation"))


def _compile(session: Session) -> Built:
    """The model's layers under torch.compile: the longest list of modules of one class."""
    wanted = session.spec.compile
    if not (session.on_gpu if wanted is None else wanted):
        return "on CUDA, or with --compile"
    modules = [module for root in session.seen_modules for module in root.modules()]
    lists = [list(module) for module in modules if isinstance(module, torch.nn.ModuleList)]
    layers = max((layers for layers in lists if len(set(map(type, layers))) == 1), key=len, default=[])
    if not layers:
        return "no list of equal layers in the model"
    if any(hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) for layer in layers):
        return "compiled already"
    forwards = [(layer.forward, torch.compile(layer.forward, dynamic=None)) for layer in layers]

    def turn(is_on: bool) -> None:
        for layer, (plain, compiled) in zip(layers, forwards, strict=True):
            layer.forward = compiled if is_on else plain

    return Switch(turn, settle_steps=4)


def no_gradient_exchange(session: Session) -> Built:
    """DistributedDataParallel without its all-reduce: every rank runs at its own speed."""
    from torch.nn.parallel import DistributedDataParallel

    modules = [root for root in session.seen_modules if isinstance(root, DistributedDataParallel)]

    def turn(is_on: bool) -> None:
        for module in modules:
            module.require_backward_grad_sync = not is_on

    return Switch(turn) if modules else "no DistributedDataParallel"
