"""Megatron-core on a machine without CUDA: what must be bridged so that the same code runs with gloo.

Megatron-core and NeMo name the CUDA device outright in some dozens of places. `bridge()` makes those places
mean the CPU, in this process and for good; it must run before megatron.core is imported, and only in a
process that trains on CPU. It changes where tensors live, never what is computed.

| piece | where upstream needs it (megatron-core 0.15, NeMo 2.7) |
|---|---|
| current_device, set_device | layers, mappings, rotary, parameter buffers, p2p, distrib_optimizer, state_dict_saver |
| .cuda(), .to('cuda'), device='cuda', pin_memory | data step and sampler, megatron_strategy, schedules, clip_grads |
| Tensor.type() | clip_grads, distrib_optimizer: pick parameters by the name of a CUDA type |
| Stream, stream, synchronize | megatron_parallel, filesystem_async, p2p |
| RNG tracker | layers, language_model_embedding, transformer_block: fork a CUDA generator |
| fork for the writer's queue | filesystem_async: spawn imports the main script again, 10 to 20 s a save |
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """A CUDA stream's interface; on CPU every operation has finished when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record_event = record = wait = _nothing


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
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def bridge() -> None:
    """Let megatron-core and NeMo train on this machine's CPU with gloo. Calling it twice is harmless."""
    if isinstance(torch.cuda.Stream, type) and issubclass(torch.cuda.Stream, _Stream):
        return
    # Megatron compiles its small fusions; on CPU that needs a C++ compiler and gains nothing.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _bridge_torch()
    _bridge_random_state()
    _bridge_checkpoint_writer()


def _bridge_torch() -> None:
    # One function per name: torch._dynamo refuses one function under two names of torch.cuda.
    cuda: Any = torch.cuda
    cuda.Stream = _Stream
    cuda.Event = type("Event", (_Stream,), {})
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": None
    torch.nn.Module.cuda = lambda self, device=None: self
    _CudaMeansCpu().__enter__()


def _bridge_random_state() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    class CpuRngTracker(megatron_random.CudaRNGStatesTracker):
        """No forked generators: dropout is off and initial weights come from the default generator."""

        def fork(self, name: str = "") -> Any:
            return contextlib.nullcontext()

        def add(self, name: str, seed: int) -> None:
            pass

        def get_states(self) -> dict[str, Any]:
            return {}

        def set_states(self, states: Any) -> None:
            pass

    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _bridge_checkpoint_writer() -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    def results_queue() -> Any:
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return filesystem_async._results_queue

    filesystem_async._get_write_results_queue = results_queue
