"""Torch's attention kernels for queries and a part of their keys, with what merging parts takes.

Letters: b batch, h query heads and g key/value heads (h a multiple of g), s queries, t keys, d head size. A kernel
gives an output [b, h, s, d] and, per query, the logarithm of the sum of its scores' exponentials [b, h, s], fp32. Its
backward pass is given both of all parts together, so that it gives this part's share of the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Queries, and keys that all of them see, or, if causal, as many keys as queries."""

    q: Tensor  # [b, h, s, d]
    k: Tensor  # [b, g, t, d]
    v: Tensor  # [b, g, t, d]
    causal: bool
    scale: float | None


class PartKernel(ABC):
    """One of torch's kernels."""

    name: str

    @abstractmethod
    def forward(self, part: Part) -> tuple[Tensor, Tensor, Any]:
        """Output, logarithms of sums, and what a backward pass wants besides, which may be another part's."""

    @abstractmethod
    def backward(self, part: Part, grad: Tensor, out: Tensor, sums: Tensor, rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""


def part_kernel(part: Part) -> PartKernel:
    """The kernel that torch itself takes for a causal part, if it is one that serves others too."""
    if not part.q.is_cuda:
        return _OnCpu()
    has_groups = part.q.size(1) != part.k.size(1)
    choice = torch._fused_sdp_choice(
        part.q, part.k, part.v, None, 0.0, part.causal, scale=part.scale, enable_gqa=has_groups
    )
    kernels = {SDPBackend.CUDNN_ATTENTION.value: CuDnn, SDPBackend.FLASH_ATTENTION.value: Flash}
    return kernels.get(choice, Efficient)()


class CuDnn(PartKernel):
    """NVIDIA's, the fastest on Hopper."""

    name = "cudnn"

    def forward(self, part: Part) -> tuple[Tensor, Tensor, Any]:
        found = aten._scaled_dot_product_cudnn_attention(
            part.q, part.k, part.v, None, True, 0.0, part.causal, False, scale=part.scale
        )
        return found[0], found[1].squeeze(-1), found[6:8]

    def backward(self, part: Part, grad: Tensor, out: Tensor, sums: Tensor, rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors = grad, part.q, part.k, part.v, out, sums.unsqueeze(-1)
        sizes = part.q.size(2), part.k.size(2)
        q, k, v = aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *rest, None, None, None, *sizes, 0.0, part.causal, scale=part.scale
        )
        return q, k, v


class Flash(PartKernel):
    """FlashAttention 2."""

    name = "flash"

    def forward(self, part: Part) -> tuple[Tensor, Tensor, Any]:
        found = aten._scaled_dot_product_flash_attention(
            part.q, part.k, part.v, 0.0, part.causal, False, scale=part.scale
        )
        return found[0], found[1], found[6:8]

    def backward(self, part: Part, grad: Tensor, out: Tensor, sums: Tensor, rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        sizes = part.q.size(2), part.k.size(2)
        q, k, v = aten._scaled_dot_product_flash_attention_backward(
            grad, part.q, part.k, part.v, out, sums, None, None, *sizes, 0.0, part.causal, *rest, scale=part.scale
        )
        return q, k, v


class Efficient(PartKernel):
    """For fp32 and what the others refuse; it wants a key head for each query head, and sums for 32 queries each."""

    name = "efficient"

    def forward(self, part: Part) -> tuple[Tensor, Tensor, Any]:
        k, v = self._for_each_query_head(part)
        found = aten._scaled_dot_product_efficient_attention(
            part.q, k, v, None, True, 0.0, part.causal, scale=part.scale
        )
        return found[0], found[1][..., : part.q.size(2)].contiguous(), found[2:4]

    def backward(self, part: Part, grad: Tensor, out: Tensor, sums: Tensor, rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self._for_each_query_head(part)
        sums = F.pad(sums, (0, -sums.size(-1) % 32))
        wanted = (True, True, True, False)
        q, k, v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, part.q, k, v, None, out, sums, *rest, 0.0, wanted, part.causal, scale=part.scale
        )
        k, v = (found.unflatten(1, (part.k.size(1), -1)).sum(2) for found in (k, v))
        return q, k, v

    def _for_each_query_head(self, part: Part) -> list[Tensor]:
        return [heads.repeat_interleave(part.q.size(1) // part.k.size(1), dim=1) for heads in (part.k, part.v)]


class _OnCpu(PartKernel):
    """Torch's flash attention for CPUs."""

    name = "cpu"

    def forward(self, part: Part) -> tuple[Tensor, Tensor, Any]:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            part.q, part.k, part.v, 0.0, part.causal, scale=part.scale
        )
        return out, sums, None

    def backward(self, part: Part, grad: Tensor, out: Tensor, sums: Tensor, rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, part.q, part.k, part.v, out, sums, 0.0, part.causal, scale=part.scale
        )
        return q, k, v
