"""Megatron-core on a machine without CUDA: what must be bridged so that the same code runs with gloo.

Megatron-core and NeMo name the CUDA device in dozens of places. `bridge()` makes those places mean the CPU, in this
process and for good; it must run before megatron.core is imported, and only in a process that trains on CPU. It changes
where tensors are, never what is computed. `patches.CPU` lists the attributes that are replaced; tensor methods and
arguments (`.cuda()`, `device="cuda"`, `pin_memory`) are redirected by a torch function mode.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pretrainkit.megatron import patches

CPU = torch.device("cpu")


def bridge() -> None:
    """Let megatron-core and NeMo train on this machine's CPU with gloo. Calling it twice is harmless.

    Raises RequestError at a version of torch or megatron-core that the patches weren't read at.
    """
    if torch.cuda.Stream is Stream:
        return
    patches.check_versions(patches.CPU)
    # Megatron compiles its small fusions; on CPU that needs a C++ compiler and gains nothing.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _CudaMeansCpu().__enter__()
    patches.apply(patches.CPU)


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every torch call that names a CUDA device to the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(CPU if _names_cuda(arg) else arg for arg in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradient clipping and the distributed optimizer pick parameters by the name of a CUDA type.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class Stream:
    """torch.cuda.Stream's interface; on CPU every operation has finished when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = _do_nothing

    def record_event(self, *_: Any) -> Event:
        """An event that has happened."""
        return Event()


class Event(Stream):
    """torch.cuda.Event's interface."""


def rng_tracker(_: Any) -> Any:
    """A tracker whose forks make the parts of a matrix different on the ranks that share it, and else change nothing.

    Without it TP ranks would start from equal parts, whose gradients are equal, too: they would stay equal for good.
    Megatron's seeds are set on CUDA alone. A fork takes its seed from the default generator, which is the same on these
    ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_expert_parallel_rng_tracker_name

    def part(name: str) -> int:
        """This rank's part of matrices that are initialized under this name."""
        if name == get_expert_parallel_rng_tracker_name():
            expert, tensor = (
                parallel_state.get_expert_model_parallel_rank,
                parallel_state.get_expert_tensor_parallel_rank,
            )
            return expert() * parallel_state.get_expert_tensor_parallel_world_size() + tensor()
        return parallel_state.get_tensor_model_parallel_rank()

    class CpuRngTracker(CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            seed = int(torch.randint(2**31, ()))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + part(name))
                yield

        def add(self, name: str, seed: int) -> None:
            pass

        def get_states(self) -> dict[str, Any]:
            return {}

        def set_states(self, states: Any) -> None:
            pass

    return CpuRngTracker()
