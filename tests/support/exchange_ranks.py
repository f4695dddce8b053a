"""Ranks on CPU that exchange tensor-parallel chunks by files in memory, each chunk copied as late as it may be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_ranks
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.megatron import linear
from pretrainkit.megatron.tp_overlap import NUM_BUFFERS, AllGatherMatmul, MatmulReduceScatter, PeerMemory
from pretrainkit.megatron.wgrad import WgradGemm


class LatePeerMemory(PeerMemory):
    """The same promises as on GPUs, where a copy may come at any time before it is waited for; here it comes then."""

    def __init__(self, group: Any, folder: Path) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._folder = group, folder
        self._turn = 0

    def next_buffer(self, num_bytes: int) -> None:
        time.sleep(random.random() * 2e-3)
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def _buffer(self, turn: int, rank: int, shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
        end = offset + shape.numel()
        path = str(self._folder / f"{turn}_{rank}")
        return torch.from_file(path, shared=True, size=2**20, dtype=dtype)[offset:end].view(shape)

    def local_buffer(self, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> Tensor:
        return self._buffer(self._turn, self.rank, shape, dtype, offset)

    def barrier(self) -> None:
        torch.distributed.barrier(self._group)

    def copy_from_peer(self, into: Tensor, source: int, offset: int = 0) -> Any:
        turn = self._turn
        return lambda: into.copy_(self._buffer(turn, source, into.shape, into.dtype, offset))

    def wait(self, copied: Callable[[], None]) -> None:  # type: ignore[override]
        time.sleep(random.random() * 2e-3)
        copied()


def compare_on_cpu(rank: int, world_size: int, *, shared: Path, rounds: int) -> None:
    """Compare over gloo; parts are late by other times on each rank."""
    torch.distributed.init_process_group("gloo")
    WgradGemm.wgrad_gemm_accum_fp32 = WgradGemm.wgrad_gemm_accum_fp16  # for CUDA alone
    random.seed(rank)
    memory = LatePeerMemory(torch.distributed.group.WORLD, shared)
    for _ in range(rounds):
        for accumulates in (False, True):
            compare_with_one_rank(memory, (4, 3, 16, 24), torch.float32, "cpu", accumulates=accumulates)


def compare_with_one_rank(
    memory: PeerMemory, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, *, accumulates: bool
) -> None:
    """Two layers, forward and backward, against the same on whole tensors in fp32."""
    length, batch, hidden, inner = sizes
    generator = torch.Generator().manual_seed(0)

    def random_leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        return values.to(device, torch.float32).requires_grad_()

    whole = random_leaf(length * memory.size, batch, hidden)
    first = [random_leaf(inner, hidden) for _ in range(memory.size)]
    second = [random_leaf(hidden, inner) for _ in range(memory.size)]
    above = random_leaf(length * memory.size, batch, hidden).detach()
    expected = sum(F.gelu(whole @ a.t()) @ b.t() for a, b in zip(first, second, strict=True))
    expected.backward(above)

    mine = slice(memory.rank * length, (memory.rank + 1) * length)
    own = (whole[mine], first[memory.rank], second[memory.rank])
    part, up, down = (tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in own)
    for weight in (up, down):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    inner_part = F.gelu(AllGatherMatmul.apply(part, up, memory, accumulates))
    output = MatmulReduceScatter.apply(inner_part, down, memory, accumulates)
    output.backward(above[mine].to(dtype))
    found = [output, part.grad, *(w.main_grad - 1 if accumulates else w.grad for w in (up, down))]
    references = [expected[mine], whole.grad[mine], first[memory.rank].grad, second[memory.rank].grad]
    for name, values, reference in zip(("output", "input", "first", "second"), found, references, strict=True):
        error = ((values.float() - reference).norm() / reference.norm()).item()
        assert error < (1e-6 if dtype == torch.float32 else 0.01), f"{name}: relative error {error:.2g}"
    assert all(getattr(weight, "grad_added_to_main_grad", False) == accumulates for weight in (up, down))


def train(rank: int, world_size: int, *, run_file: Path, shared: Path) -> None:
    """`ranks.train_until_stopped` with layers whose communication overlaps with their GEMMs."""
    memories: dict[Any, LatePeerMemory] = {}

    def peer_memory_of(group: Any) -> LatePeerMemory:
        return memories.setdefault(group, LatePeerMemory(group, shared))

    fused_ranks.use_kernels(tp_comm_overlap="copies")
    linear.peer_memory_of = peer_memory_of
    ranks.train_until_stopped(rank, world_size, run_file=run_file)
    assert memories
