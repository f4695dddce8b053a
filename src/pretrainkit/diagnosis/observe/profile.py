"""A sample of torch.profiler: the operators that take the time, kernels of attention, and how busy the GPU is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.diagnosis.observe.windows import Steps

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

ATTENTION_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "fused",
    "aten::_scaled_dot_product_attention_math": "math",
}
TRANSFORMER_ENGINE, EAGER = "transformer engine", "eager (softmax and matrix products of its own)"


def profile_steps(session: Session, steps: int) -> Steps:
    """Let the program run some steps under the profiler, and write down what it saw."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler: Any = torch.profiler.profile(activities=activities)
    try:
        profiler.__enter__()
    except RuntimeError as error:  # the program profiles itself
        session.notes.append(f"no profile: {error}")
        return
    session.synchronize()
    begin_s = time.perf_counter()
    for _ in range(steps):
        yield
    session.synchronize()
    wall_s = time.perf_counter() - begin_s
    profiler.__exit__(None, None, None)
    summary = _summary(session, profiler, wall_s) | {"steps": steps}
    session.attention_kinds = summary["attention"]
    session.write(profile=summary)


def _summary(session: Session, profiler: Any, wall_s: float) -> dict[str, Any]:
    averages = profiler.key_averages()
    device = [item for item in averages if str(getattr(item, "device_type", "")).endswith("CUDA")]
    operators = [item for item in averages if item not in device]

    def seconds(item: Any) -> float:
        return float(getattr(item, "self_device_time_total" if session.on_gpu else "self_cpu_time_total", 0)) / 1e6

    names = {item.key: item.count for item in operators}
    listed = sorted(device or operators, key=seconds, reverse=True)
    kernel_s = sum(seconds(item) for item in device)
    return {
        "wall_s": wall_s,
        "top": [{"name": item.key[:120], "seconds": seconds(item), "calls": item.count} for item in listed[:15]],
        "attention": _attention(names),
        "kernel_s": kernel_s,
        "nccl_s": sum(seconds(item) for item in device if "nccl" in item.key.lower()),
    }


def _attention(names: dict[str, int]) -> dict[str, int]:
    """Attention implementation -> calls in the profiled steps."""
    found = {kind: names[name] for name, kind in ATTENTION_OPERATORS.items() if name in names}
    if not found and any("FusedAttn" in name or "FlashAttn" in name for name in names):
        return {TRANSFORMER_ENGINE: 1}
    softmax = names.get("aten::_softmax", 0)
    if not found and softmax and names.get("aten::bmm", 0) >= 2 * softmax:
        return {EAGER: softmax}
    return found
