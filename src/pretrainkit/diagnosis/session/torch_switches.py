"""The changes that torch itself is asked for: other kernels, other precision, checks off, layers compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis.session.switch import WORTH_A_LOOK, Built, Switch

if TYPE_CHECKING:
    from pretrainkit.diagnosis.session.child import Session

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
BETTER_KERNEL = 0.85
"""An attention kernel is tried when it takes at most this share of the time of the one in use."""


def attention(session: Session) -> Built:
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


def tf32(session: Session) -> Built:
    """float32 matrix products on tensor cores."""
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


def bf16(session: Session) -> Built:
    """The forward pass under autocast."""
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


def fused_optimizer(session: Session) -> Built:
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


def anomaly_detection() -> Built:
    """Without autograd's search for NaN."""
    if not torch.is_anomaly_enabled():
        return "off"
    check_nan = torch.is_anomaly_check_nan_enabled()
    return Switch(
        "anomaly_detection",
        lambda: torch.autograd.set_detect_anomaly(False) and None,
        lambda: torch.autograd.set_detect_anomaly(True, check_nan) and None,
    )


def deterministic() -> Built:
    """With whatever algorithm is fastest."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return Switch(
        "deterministic",
        lambda: torch.use_deterministic_algorithms(False),
        lambda: torch.use_deterministic_algorithms(True, warn_only=warn_only),
    )


def recomputation(session: Session) -> Built:
    """Activations kept for the backward pass."""
    if not session.loop.checkpoint_calls:
        return "not used"
    if session.on_gpu:
        _, total = torch.cuda.mem_get_info()
        if torch.cuda.max_memory_allocated() > total / 3:
            return "too little GPU memory to try without it"

    def switch(value: bool) -> None:
        session.no_recomputation = value

    return Switch("recomputation", lambda: switch(True), lambda: switch(False))


def compile_layers(session: Session) -> Built:
    """The model's layers under torch.compile."""
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
