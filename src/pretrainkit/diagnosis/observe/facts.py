"""What can be read off a running program: versions, settings, its model, loader and optimizer."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

WATCHED_VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TOKENIZERS_", "NVTE_")


def environment() -> dict[str, Any]:
    """Versions, threads, and environment variables that have to do with speed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(WATCHED_VARIABLES) or name in ("PYTHONMALLOC", "PYTHONDEVMODE")
        },
        "threads": torch.get_num_threads(),
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def num_compiled_frames() -> int:
    """Python frames that torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo else 0


def of_program(session: Session) -> dict[str, Any]:
    """Model, loader, optimizer and device of the loop."""
    loader, on_gpu = session.loop.loader, session.on_gpu
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "memory_gib": torch.cuda.get_device_properties(session.device).total_memory / 2**30 if on_gpu else None,
        "model": _model(session),
        "optimizers": [_optimizer(item) for item in session.loop.optimizers],
        "loader": None if loader is None else _loader(loader),
        "attention": session.loop.attention,
        "tf32": _allows_tf32(),
        "anomaly_detection": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpus": session.num_cpus,
        "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0,
        "tokenizer": tokenizer(),
    }


def _allows_tf32() -> bool | None:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by both of torch's interfaces for it
        return None


def _model(session: Session) -> dict[str, Any]:
    """Number and types of the parameters that are trained."""
    parameters = [item for root in session.seen_modules for item in root.parameters()]
    return {
        "parameters": sum(item.numel() for item in parameters),
        "dtypes": sorted({str(item.dtype).removeprefix("torch.") for item in parameters}),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        "class": type(optimizer).__name__,
        "fused": any(bool(group.get("fused")) for group in groups),
        "foreach": [group.get("foreach") for group in groups][:1],
    }


def _loader(loader: Any) -> dict[str, Any]:
    try:
        length = len(loader)
    except TypeError:
        length = None
    return {
        "dataset": type(loader.dataset).__name__,
        "batches": length,
        "rows": len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "collate_fn": getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__name__),
    }


def tokenizer() -> dict[str, Any] | None:
    """Special tokens of a transformers tokenizer that the program has made."""
    module = sys.modules.get("transformers.tokenization_utils_base")
    if module is None:
        return None
    import gc

    # By its type: isinstance asks the object itself, and some raise.
    found = [item for item in gc.get_objects() if issubclass(type(item), module.PreTrainedTokenizerBase)]
    if not found:
        return None
    first = found[0]
    return {
        "name": first.name_or_path,
        "padding_side": first.padding_side,
        "pad_token_id": first.pad_token_id,
        "eos_token_id": first.eos_token_id,
        "bos_token_id": first.bos_token_id,
    }
