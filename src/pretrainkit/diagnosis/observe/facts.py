"""What can be read off a running program: settings of torch, its model, loader, optimizer and tokenizer."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

WATCHED_VARIABLES = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NCCL_", "NVIDIA_", "TORCH", "PYTORCH_", "PYTHON"),
    *("TOKENIZERS_", "NVTE_", "MALLOC_"),
)


def num_compiled_frames() -> int:
    """Python frames that torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo else 0


def of_program(session: Session) -> dict[str, Any]:
    """Environment, device, model, loader and optimizer of the loop."""
    loader, on_gpu = session.loader, session.on_gpu
    return {
        "torch": torch.__version__,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(WATCHED_VARIABLES)},
        "threads": torch.get_num_threads(),
        "affinity": len(os.sched_getaffinity(0)),
        "cpus": session.num_cpus,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "memory_gib": torch.cuda.mem_get_info()[1] / 2**30 if on_gpu else None,
        "dtypes": sorted({str(item.dtype) for root in session.modules for item in root.parameters()}),
        "attention_dtype": session.attention_dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizers": [
            {"class": type(item).__name__, "fused": any(bool(group.get("fused")) for group in item.param_groups)}
            for item in session.optimizers
        ],
        "loader": {} if loader is None else _loader(loader),
        "tokenizer": tokenizer(),
    }


def _loader(loader: Any) -> dict[str, Any]:
    try:
        length = len(loader)
    except TypeError:
        length = None
    names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
    settings = {name: getattr(loader, name) for name in names}
    return {"dataset": type(loader.dataset).__name__, "batches": length, **settings}


def tokenizer() -> dict[str, Any]:
    """Padding and EOS of a transformers tokenizer that the program has made; empty without one."""
    module = sys.modules.get("transformers.tokenization_utils_base")
    base = getattr(module, "PreTrainedTokenizerBase", None)
    # By its type: isinstance asks the object itself, and some raise.
    found = next((item for item in gc.get_objects() if base and issubclass(type(item), base)), None)
    names = ("padding_side", "pad_token_id", "eos_token_id")
    return {} if found is None else {name: getattr(found, name) for name in names}
