"""Settings that cost time on many machines and are read off the program: advised, not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrainkit.diagnosis.checks import Check, warning

SHORT_EPOCH_STEPS = 200
"""Workers that start again so often are noticed: a start takes about a second."""
MANY_SHAPES = 2
VISIBLE = 0.05
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD")
"""Of torch; they take fused=True."""


@dataclass(frozen=True)
class Setting:
    """One row: what it is, when it costs time, what was found, and the change."""

    what: str
    is_slow: Callable[[dict[str, Any], dict[str, Any]], object]
    """By the facts of a rank, and its loader's."""
    found: str
    change: str


def _on_gpu(rank: dict[str, Any]) -> bool:
    return str(rank["facts"]["device"]) != "cpu"


SETTINGS = (
    Setting(
        "pinned memory",
        lambda rank, loader: _on_gpu(rank) and loader and not loader["pin_memory"],
        "batches are copied to the GPU from pageable memory",
        "DataLoader(..., pin_memory=True), and .to(device, non_blocking=True)",
    ),
    Setting(
        "prefetching",
        lambda rank, loader: loader.get("num_workers") and (loader.get("prefetch_factor") or 2) < 2,
        "each worker prepares one batch ahead",
        "DataLoader(..., prefetch_factor=4)",
    ),
    Setting(
        "workers of an epoch",
        lambda rank, loader: (
            loader.get("num_workers")
            and not loader["persistent_workers"]
            and (loader.get("batches") or SHORT_EPOCH_STEPS) < SHORT_EPOCH_STEPS
        ),
        "workers are started again for every short epoch",
        "DataLoader(..., persistent_workers=True) (Trainer: dataloader_persistent_workers=True)",
    ),
    Setting(
        "fused optimizer",
        lambda rank, loader: (
            rank["observed"]["phases_s"].get("optimizer", 0.0) > VISIBLE * rank["observed"]["wall_s"]
            and any(item["class"] in FUSED_OPTIMIZERS and not item["fused"] for item in rank["facts"]["optimizers"])
        ),
        "the optimizer's step is a visible part of the time, and made of many small ones",
        "fused=True for the optimizer",
    ),
    Setting(
        "precision",
        lambda rank, loader: (
            _on_gpu(rank)
            and rank["facts"]["model"].get("dtypes") == ["float32"]
            and rank["facts"]["attention"].get("dtype", "float32") == "float32"
        ),
        "the model computes in float32",
        'bf16, if the training bears it: torch.autocast("cuda", torch.bfloat16) (Trainer: bf16=True)',
    ),
    Setting(
        "deterministic algorithms",
        lambda rank, loader: rank["facts"]["deterministic"],
        "torch.use_deterministic_algorithms is on",
        "turn it off where runs needn't be equal bit by bit",
    ),
    Setting(
        "CPU binding",
        lambda rank, loader: rank["environment"]["affinity"] < rank["facts"]["cpus"],
        "the process is bound to fewer cores than its part of the machine",
        "taskset, numactl or the scheduler's --cpus-per-task",
    ),
    Setting(
        "new shapes",
        lambda rank, loader: (
            rank["observed"]["compiled_frames"]
            and len({tuple(batch["shape"]) for batch in rank["observed"]["batches"]}) > MANY_SHAPES
        ),
        "torch.compile compiles again for new shapes of batches",
        "batches of one shape (packed, or pad_to_multiple_of), or torch.compile(dynamic=True)",
    ),
    Setting(
        "GPU memory",
        lambda rank, loader: rank["facts"]["allocator_retries"],
        "the allocator had to free its cache and ask again: memory is nearly full",
        "a smaller micro batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
)


def check_settings(rank: dict[str, Any]) -> list[Check]:
    """The rows that hold for a rank."""
    loader = rank["facts"]["loader"] or {}
    return [
        warning(row.what, f"{row.found} (its cost wasn't measured)", row.change)
        for row in SETTINGS
        if row.is_slow(rank, loader)
    ]
