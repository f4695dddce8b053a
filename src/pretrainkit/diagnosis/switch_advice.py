"""What to do about the cause that a switch has shown, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretrainkit.diagnosis.cause import Cause

if TYPE_CHECKING:
    from pretrainkit.diagnosis.evidence import Shown


def of_switch(shown: Shown, gain: str, rank: dict[str, Any]) -> Cause:
    """The cause that a switch has shown."""
    detail = rank["switches"][shown.probe]["detail"]
    title, why, change = _TEXTS[shown.probe]
    facts: dict[str, Any] = {
        "detail": detail,
        "attention": ", ".join((rank.get("profile") or {}).get("attention", {})) or "none",
        "padding": "",
        "shapes": len({tuple(batch["shape"]) for batch in rank["observed"]["batches"]}),
        "loggers": "; ".join([*rank["observed"]["loggers"], *rank["observed"]["reads"]][:4]) or detail,
    }
    seen = [batch for batch in rank["observed"]["batches"] if batch["tokens"]]
    if seen:
        share = 1 - sum(batch["real_tokens"] for batch in seen) / sum(batch["tokens"] for batch in seen)
        facts["padding"] = f"{share:.0%}"
    return Cause(
        shown.probe,
        title,
        shown.share,
        why.format(**facts),
        change.format(**facts),
        f"with the change: {gain}",
        shown.probe in ("bf16", "compile", "recomputation"),
        evidence=shown.to_json(),
    )


_TEXTS: dict[str, tuple[str, str, str]] = {
    # probe: title, what was seen, change
    "packing": (
        "padding is computed",
        "{padding} of the tokens are padding, in {shapes} different shapes",
        "pack samples into full rows (tools/pack_dataset.py, or .bin/.idx), or sort by length within a window",
    ),
    "attention": (
        "a slow attention kernel is used",
        "attention runs as {attention}",
        'use {detail}: attn_implementation="sdpa", no sdpa_kernel(MATH), no dense mask where is_causal=True will do',
    ),
    "tf32": (
        "TF32 is off",
        "float32 matrix products run without tensor cores",
        'torch.set_float32_matmul_precision("high")',
    ),
    "bf16": (
        "float32 instead of bf16",
        "the model computes in float32",
        'with torch.autocast("cuda", torch.bfloat16): around the forward pass (Trainer: bf16=True)',
    ),
    "fused_optimizer": (
        "the optimizer runs parameter by parameter",
        "its step takes a visible part of the time",
        "torch.optim.AdamW(..., fused=True)",
    ),
    "threads": (
        "a wrong number of CPU threads",
        "it could compute with {detail}",
        "OMP_NUM_THREADS (torchrun sets 1 where it is not set), or torch.set_num_threads: {detail}",
    ),
    "cpu_binding": (
        "the process is bound to too few cores",
        "it could use {detail}",
        "taskset, numactl or the scheduler's --cpus-per-task: {detail}",
    ),
    "logging": (
        "logging holds up every step",
        "in every step: {loggers}",
        "log every 10 to 100 steps; keep values on the device (no .item(), no print) until then",
    ),
    "checkpoint_writes": (
        "saving holds up the steps",
        "files were saved in the steps that were watched",
        "save less often",
    ),
    "anomaly_detection": (
        "autograd's anomaly detection is on",
        "torch.is_anomaly_enabled()",
        "remove torch.autograd.set_detect_anomaly(True)",
    ),
    "deterministic": (
        "deterministic algorithms are forced",
        "torch.are_deterministic_algorithms_enabled()",
        "remove torch.use_deterministic_algorithms(True)",
    ),
    "recomputation": (
        "activations are computed twice",
        "torch.utils.checkpoint is used",
        "turn recomputation off, or on for fewer layers, if memory allows",
    ),
    "compile": (
        "torch.compile is not used",
        "the model's layers run operator by operator",
        "for layer in model.layers: layer.compile()",
    ),
}
