"""torch's attention kernels with their log-sum-exp, for attention over one block of keys at a time.

Letters: b batch, h query heads and g key/value heads (h a multiple of g), s queries, t keys, d head size. A kernel
returns an output [b, h, s, d] and the log-sum-exp (lse) of each query's scores [b, h, s] in fp32, with which outputs of
several blocks are merged. Its backward pass takes the merged output and lse and returns the block's gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger

log = get_logger(__name__)
aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]

CUDNN_CAPABILITIES = (9, 10)
"""Major compute capabilities (Hopper, Blackwell) for which torch prefers cuDNN's kernel."""


def attention_kernel(run: ResolvedRun) -> str:
    """Name of the kernel that torch selects for this run's attention on this rank's device; warns of a slow one."""
    if run.accelerator == "cpu":
        return "cpu"
    if run.reset_attention_mask:
        return "flash"
    shape, tensor = run.model, run.config.parallel.tensor_model_parallel_size
    length = run.config.data.sequence_length // run.config.parallel.context_parallel_size
    heads = (shape.num_attention_heads // tensor, max(1, shape.num_query_groups // tensor))
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    q, k = (torch.empty((1, n, length, shape.head_dim), dtype=dtype, device="cuda", requires_grad=True) for n in heads)
    name = block_kernel(AttentionBlock(q, k, k, causal=True, scale=None)).name
    if shape.features.attention_softcap or (shape.features.attention_sinks and dtype == torch.float32):
        return "torch"  # scores in memory, MAX_QUERIES queries at a time
    if name != "cudnn" and dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in CUDNN_CAPABILITIES:
        log.warning(
            "torch selected its %s attention kernel, not cuDNN's, which takes 0.6 of the time on this GPU: %s",
            name,
            _why_not_cudnn(),
        )
    return name


def _why_not_cudnn() -> str:
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # a library path or a package has loaded a cuDNN that is not torch's
        return str(error)
    return f"cuDNN {version}, see torch.backends.cuda.cudnn_sdp_enabled() and TORCH_CUDNN_SDPA_DEPRIORITIZED"


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and a block of keys that all of them attend to or, if causal, as many keys as queries."""

    q: Tensor  # [b, h, s, d]
    k: Tensor  # [b, g, t, d]
    v: Tensor  # [b, g, t, d]
    causal: bool
    scale: float | None


class BlockKernel(ABC):
    """One of torch's attention kernels."""

    name: str

    @abstractmethod
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        """Output, lse, and the random state that backward requires; any block's will do, as there is no dropout."""

    @abstractmethod
    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        """Gradients of queries, keys and values."""


def block_kernel(block: AttentionBlock) -> BlockKernel:
    """The kernel that torch selects for a causal block, if it also serves blocks that are not causal."""
    if not block.q.is_cuda:
        return _OnCpu()
    has_groups = block.q.size(1) != block.k.size(1)
    choice = torch._fused_sdp_choice(
        block.q, block.k, block.v, None, 0.0, block.causal, scale=block.scale, enable_gqa=has_groups
    )
    kernels = {SDPBackend.CUDNN_ATTENTION.value: CuDnn, SDPBackend.FLASH_ATTENTION.value: Flash}
    return kernels.get(choice, Efficient)()


class CuDnn(BlockKernel):
    """cuDNN's, the fastest on Hopper."""

    name = "cudnn"

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        found = aten._scaled_dot_product_cudnn_attention(
            block.q, block.k, block.v, None, True, 0.0, block.causal, False, scale=block.scale
        )
        return found[0], found[1].squeeze(-1), found[6:8]

    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        tensors = grad, block.q, block.k, block.v, out, lse.unsqueeze(-1)
        sizes = block.q.size(2), block.k.size(2)
        q, k, v = aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *rng_state, None, None, None, *sizes, 0.0, block.causal, scale=block.scale
        )
        return q, k, v


class Flash(BlockKernel):
    """FlashAttention 2."""

    name = "flash"

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        found = aten._scaled_dot_product_flash_attention(
            block.q, block.k, block.v, 0.0, block.causal, False, scale=block.scale
        )
        return found[0], found[1], found[6:8]

    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        tensors = grad, block.q, block.k, block.v, out, lse
        sizes = block.q.size(2), block.k.size(2)
        q, k, v = aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, *sizes, 0.0, block.causal, *rng_state, scale=block.scale
        )
        return q, k, v


@dataclass(frozen=True)
class Segments:
    """Segments of a block's queries and as many of its keys: a segment's queries are the last of its tokens."""

    bounds: Tensor  # [2, m + 1], int32: of queries, of keys
    most_queries: int
    """No less than the longest has; as small as is known without a look at the bounds, as is `most_keys`."""
    most_keys: int


class CausalFlash(BlockKernel):
    """FlashAttention 2 of a causal block whose queries are the last of its tokens, or those of each of its segments.

    Queries attend to the last `window` keys only, themselves included; 0: to all. A block with segments has b = 1.
    """

    name = "flash"

    def __init__(self, window: int = 0, segments: Segments | None = None) -> None:
        self._window = {"window_size_left": window - 1, "window_size_right": 0}
        self._segments = segments

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        tensors = (self._row(part.transpose(1, 2)) for part in (block.q, block.k, block.v))
        found = aten._flash_attention_forward(
            *tensors, *self._bounds(block), 0.0, block.causal, False, scale=block.scale, **self._window
        )
        out, lse = (part.unsqueeze(0) if self._segments else part for part in found[:2])
        return out.transpose(1, 2), lse, found[2:4]

    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        tensors = (self._row(part.transpose(1, 2)) for part in (grad, block.q, block.k, block.v, out))
        settings = *self._bounds(block), 0.0, block.causal, *rng_state
        found = aten._flash_attention_backward(*tensors, self._row(lse), *settings, scale=block.scale, **self._window)
        q, k, v = (part.unsqueeze(0) if self._segments else part for part in found)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _row(self, part: Tensor) -> Tensor:
        return part.squeeze(0) if self._segments else part

    def _bounds(self, block: AttentionBlock) -> tuple[Tensor | None, Tensor | None, int, int]:
        if self._segments is None:
            return None, None, block.q.size(2), block.k.size(2)
        queries, keys = self._segments.bounds
        return queries, keys, self._segments.most_queries, self._segments.most_keys


class Efficient(BlockKernel):
    """For fp32 and what the others refuse; needs a key head per query head, and lse padded to a multiple of 32."""

    name = "efficient"

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        k, v = self._for_each_query_head(block)
        found = aten._scaled_dot_product_efficient_attention(
            block.q, k, v, None, True, 0.0, block.causal, scale=block.scale
        )
        return found[0], found[1][..., : block.q.size(2)].contiguous(), found[2:4]

    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        k, v = self._for_each_query_head(block)
        lse = F.pad(lse, (0, -lse.size(-1) % 32))
        needs_grad = (True, True, True, False)
        q, k, v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, block.q, k, v, None, out, lse, *rng_state, 0.0, needs_grad, block.causal, scale=block.scale
        )
        k, v = (found.unflatten(1, (block.k.size(1), -1)).sum(2) for found in (k, v))
        return q, k, v

    def _for_each_query_head(self, block: AttentionBlock) -> list[Tensor]:
        return [heads.repeat_interleave(block.q.size(1) // block.k.size(1), dim=1) for heads in (block.k, block.v)]


def attend(block: AttentionBlock, kernel: BlockKernel, sinks: Tensor | None) -> Tensor:
    """Attention [b, h, s, d] of a block by a kernel that supports it; `sinks` [h] as `attend_causally` has them."""
    out: Tensor = _Attended.apply(block, block.q, block.k, block.v, sinks, kernel)
    return out


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: BlockKernel
    ) -> Tensor:
        out, lse, rng_state = kernel.forward(block)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.kernel, ctx.rng_state, ctx.causal, ctx.scale = kernel, rng_state, block.causal, block.scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        block = AttentionBlock(q, k, v, ctx.causal, ctx.scale)
        of_sinks = None if sinks is None else gradient_of_sinks(sinks, grad, out, lse)
        return None, *ctx.kernel.backward(block, grad, out, lse, ctx.rng_state), of_sinks, None


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [b, h, s, d] and lse [b, h, s] of attention to sinks [h], too.

    A sink is a block of keys of its own, whose values are zero: its lse is its weight.
    """
    weights = sinks.float()[:, None]
    joined = (out * torch.sigmoid(lse - weights)[..., None]).to(out.dtype)
    return joined, torch.logaddexp(lse, weights.expand_as(lse))


def gradient_of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient [h] by that of the output [b, h, s, d] and what `with_sinks` gave."""
    shares = torch.exp(sinks.float()[:, None] - lse)  # [b, h, s]
    return -(shares * (grad.float() * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


class _OnCpu(BlockKernel):
    """torch's flash attention for CPUs."""

    name = "cpu"

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Any]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            block.q, block.k, block.v, 0.0, block.causal, scale=block.scale
        )
        return out, lse, None

    def backward(self, block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor, rng_state: Any) -> Gradients:
        q, k, v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, block.q, block.k, block.v, out, lse, 0.0, block.causal, scale=block.scale
        )
        return q, k, v
