"""Tensor-parallel linear layers under sequence parallelism whose communication overlaps with their GEMMs.

Megatron all-gathers a layer's input before its GEMM, and reduce-scatters the next layer's output after its GEMM. Here
a GEMM is split by the ranks' chunks of the sequence: while one chunk is multiplied, copy engines fetch another from
peer memory (torch's symmetric memory). torch's `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` do the same
in about thirty launches, which take 0.5 ms and more on the host, too long for a layer of the 1B shape; these take about
ten.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from pretrainkit.logs import get_logger
from pretrainkit.megatron.wgrad import WgradGemm

NUM_BUFFERS = 3
"""A buffer of operation n may be read by peers until the end of operation n + 1. All ranks pass a barrier in operation
n + 2, before the buffer is written again in operation n + 3."""

log = get_logger(__name__)


class PeerMemory:
    """Buffers of a group's ranks that are mapped into each other's memory, and a stream for copies from peers.

    All ranks must call the same methods in the same order, with the same sizes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._copy_stream = torch.cuda.Stream()
        self._memory: list[Tensor] = []
        self._buffers: list[Any] = []
        self._turn = 0

    def next_buffer(self, num_bytes: int) -> None:
        """Start an operation: switch to a buffer of at least this size that no rank reads any more."""
        if not self._memory or num_bytes > self._memory[0].nbytes:
            self._grow(num_bytes)
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def local_buffer(self, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """This rank's buffer from element `offset` on, to be written before the barrier."""
        return self._buffers[self._turn].get_buffer(self.rank, shape, dtype, offset)

    def barrier(self) -> None:
        """Let the GPU wait until all ranks' writes to their buffers are visible."""
        self._buffers[self._turn].barrier()
        self._copy_stream.wait_stream(torch.cuda.current_stream())

    def copy_from_peer(self, into: Tensor, source: int, offset: int = 0) -> torch.cuda.Event:
        """Copy rank `source`'s buffer from `offset` on, concurrently with the current stream; gives the end."""
        with torch.cuda.stream(self._copy_stream):
            into.copy_(self._buffers[self._turn].get_buffer(source, into.shape, into.dtype, offset))
            return self._copy_stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        """Let the current stream wait for a copy."""
        torch.cuda.current_stream().wait_event(copied)

    def _grow(self, num_bytes: int) -> None:
        """Allocate larger buffers once no rank uses the present ones."""
        torch.cuda.synchronize()
        torch.distributed.barrier(self._group)
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = [symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._buffers = [symmetric_memory.rendezvous(tensor, self._group) for tensor in self._memory]


@functools.cache
def peer_memory_of(group: ProcessGroup) -> PeerMemory | None:
    """The group's peer memory, one per process; None on all ranks if one of them has none."""
    problem = _inaccessible_peers()
    if not _any_has(problem, group):
        memory = PeerMemory(group)
        try:
            memory.next_buffer(2**20)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        if not _any_has(problem, group):
            return memory
    log.warning(
        "tensor-parallel communication does not overlap with GEMMs, NCCL is used: %s",
        problem or "another rank has no peer memory",
    )
    return None


def _any_has(problem: str, group: ProcessGroup) -> bool:
    count = torch.tensor([bool(problem)], dtype=torch.int32, device="cuda")
    torch.distributed.all_reduce(count, group=group)
    return bool(count.item())


def _inaccessible_peers() -> str:
    """A sentence that names this node's GPUs without peer access from this rank's; empty if there are none."""
    own = torch.cuda.current_device()
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    gpus = [str(gpu) for gpu in others if not torch.cuda.can_device_access_peer(own, gpu)]
    return f"GPU {own} has no peer access to GPU {', '.join(gpus)}" if gpus else ""


def start_all_gather(memory: PeerMemory, chunk: Tensor) -> tuple[Tensor, dict[int, Any]]:
    """Start gathering all ranks' chunks [s/tp, b, k] into [tp, s/tp, b, k]; gives that and an event per other rank."""
    memory.next_buffer(chunk.nbytes)
    memory.local_buffer(chunk.shape, chunk.dtype).copy_(chunk)
    memory.barrier()
    gathered = chunk.new_empty((memory.size, *chunk.shape))
    sources = [(memory.rank + step) % memory.size for step in range(1, memory.size)]
    return gathered, {source: memory.copy_from_peer(gathered[source], source) for source in sources}


def all_gather_matmul(memory: PeerMemory, chunk: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gathered input [tp, s/tp, b, k], in which this rank's chunk is left unset, and its matmul [s, b, n].

    `chunk` [s/tp, b, k] is this rank's, `weight` [k, n].
    """
    gathered, copies = start_all_gather(memory, chunk)
    output = chunk.new_empty((*gathered.shape[:-1], weight.shape[1]))
    torch.mm(chunk.flatten(0, -2), weight, out=output[memory.rank].flatten(0, -2))
    for source, copied in copies.items():
        memory.wait(copied)
        torch.mm(gathered[source].flatten(0, -2), weight, out=output[source].flatten(0, -2))
    return gathered, output.flatten(0, 1)


def matmul_reduce_scatter(memory: PeerMemory, inputs: Tensor, weight: Tensor) -> Tensor:
    """This rank's chunk [s/tp, b, n] of the sum over ranks of `inputs` [s, b, k] times `weight` [k, n].

    The chunks of other ranks are multiplied first, so that peers fetch them during the matmul of this rank's own.
    """
    chunks = inputs.unflatten(0, (memory.size, -1))
    own = inputs.new_empty((*chunks.shape[1:-1], weight.shape[1]))
    others = own.new_empty((memory.size - 1, *own.shape))
    memory.next_buffer(others.nbytes)
    copies = []
    for step in range(1, memory.size):
        offset = (step - 1) * own.numel()
        destination, source = (memory.rank + step) % memory.size, (memory.rank - step) % memory.size
        partial_sum = memory.local_buffer(own.shape, own.dtype, offset).flatten(0, -2)
        torch.mm(chunks[destination].flatten(0, -2), weight, out=partial_sum)
        memory.barrier()
        copies.append(memory.copy_from_peer(others[step - 1], source, offset))
    torch.mm(chunks[memory.rank].flatten(0, -2), weight, out=own.flatten(0, -2))
    for other, copied in zip(others, copies, strict=True):
        memory.wait(copied)
        own += other
    return own


class AllGatherMatmul(torch.autograd.Function):
    """Column-parallel linear: all ranks' `inputs` [s/tp, b, k] times the transpose of `weight` [n/tp, k]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, memory: PeerMemory, fuses_wgrad: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.memory, ctx.main_grad = memory, _buffer_of(weight, fuses_wgrad)
        return all_gather_matmul(memory, inputs, weight.t())[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        gathered, copies = start_all_gather(ctx.memory, inputs)
        input_gradient = matmul_reduce_scatter(ctx.memory, gradient, weight)
        gathered[ctx.memory.rank] = inputs
        for copied in copies.values():
            ctx.memory.wait(copied)
        return input_gradient, _weight_gradient(weight, ctx.main_grad, gathered, gradient), None, None


class MatmulReduceScatter(torch.autograd.Function):
    """Row-parallel linear: `inputs` [s, b, k/tp] times the transpose of `weight` [n, k/tp], summed over ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, memory: PeerMemory, fuses_wgrad: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.memory, ctx.main_grad = memory, _buffer_of(weight, fuses_wgrad)
        return matmul_reduce_scatter(memory, inputs, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        gathered, input_gradient = all_gather_matmul(ctx.memory, gradient, weight)
        gathered[ctx.memory.rank] = gradient
        return input_gradient, _weight_gradient(weight, ctx.main_grad, inputs, gathered), None, None


def _buffer_of(weight: Any, fuses_wgrad: bool) -> Tensor | None:
    return getattr(weight, "main_grad", None) if fuses_wgrad else None


def _weight_gradient(weight: Any, main_grad: Tensor | None, inputs: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of `weight` [n, k]; with a `main_grad` it is added there, and Megatron's hooks get a placeholder."""
    inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
    if main_grad is None:
        return gradient.t() @ inputs
    WgradGemm.wgrad_gemm_accum_fp32(inputs, gradient, main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
