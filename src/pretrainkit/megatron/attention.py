"""Causal self-attention on torch's scaled_dot_product_attention, correct under TP, SP, PP and CP.

It replaces Transformer Engine's DotProductAttention in Megatron's layer spec. No S x S mask is built: torch selects its
flash or cuDNN kernel for causal attention.

Context parallelism: a sequence is split into 2n chunks for n ranks, and rank r has chunks r and 2n-1-r (Megatron's
load-balanced split). Attention among a rank's two chunks is plain causal attention, which needs no other rank's keys:
it runs while those arrive. All queries attend to the first chunk of a rank j < r, and none to its second; only the
second chunk's queries attend to a rank j > r, and to both its chunks. So no block needs a mask, and each is one call of
torch's fastest kernel. Blocks are merged by their log-sum-exp; the backward pass gets the merged one, as in ring
attention (Liu et al. 2023, arXiv:2310.01889). With a window or a soft cap, each of a rank's chunks attends in one call
to the keys from its first query's window up to its own end.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, distributed

from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.megatron.attention_kernels import AttentionBlock, block_kernel, gradient_of_sinks, with_sinks
from pretrainkit.megatron.document_attention import (
    attend_within_documents,
    chunks_of,
    document_positions,
    keys_of_chunks,
    segment_bounds,
)
from pretrainkit.megatron.window_attention import attend_causally


class ScaledDotProductAttention(MegatronModule):
    """Core attention of one layer on one rank.

    Letters below: s tokens on this rank, b batch, h query heads and g key/value heads on this rank, d head size.
    It has no entry in checkpoints but the sinks [h]; Transformer Engine's attention has none but these in Megatron
    either.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        features: LayerFeatures = LLAMA,
        rotary_factor: float = 1.0,
    ) -> None:
        """`rotary_factor` is that of rotated queries and of rotated keys (RopeScaling.attention_factor)."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attn_mask_type != AttnMaskType.causal or dropout or config.window_size:
            raise NotImplementedError(
                f"only causal attention without dropout is supported, and windows as LayerFeatures states them; found "
                f"{attn_mask_type}, dropout {dropout}, window {config.window_size}"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
        self.cp_group, self._tp_group = groups.cp, groups.tp
        layer = layer_number - 1
        is_local = layer in features.local_layers
        self.window = features.sliding_window if is_local else 0
        self.chunk = features.attention_chunk if is_local else 0
        self.softmax_scale = softmax_scale if features.attention_scale is None else features.attention_scale
        self.softcap = features.attention_softcap
        has_rotary = layer not in features.nope_layers
        self.growth = features.query_growth if not features.nope_layers or not has_rotary else 0.0
        self.span, self.offset = features.query_span, features.query_offset
        self.has_l2_norm = features.qk_l2_norm and has_rotary
        self.softmax_offset = self._sinks() if features.attention_sinks else None
        is_scaled = has_rotary and not (is_local and features.local_rope_theta)
        self.rotated_size, self.rotated_factor = 0, rotary_factor**2
        if is_scaled and rotary_factor != 1 and features.rotary_fraction != 1:
            self.rotated_size = int(config.kv_channels * features.rotary_fraction)
        elif is_scaled and rotary_factor != 1:
            self.softmax_scale = (self.softmax_scale or config.kv_channels**-0.5) * rotary_factor**2

    def forward(
        self,
        query: Tensor,  # [s, b, h, d]
        key: Tensor,  # [s, b, g, d]
        value: Tensor,  # [s, b, g, d]
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # [s, b, h * d]
        """Attend to all earlier tokens or, with `attention_mask`, to those of the same document.

        `attention_mask` is None or what `document_attention.segment_bounds` gives; a mask of another shape, such as
        that of Megatron's inference code, is ignored: attention is always causal.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("packed sequences and attention biases need Transformer Engine")
        documents = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        tokens = query.size(0) * self.cp_group.size()
        window = self.window if self.window < tokens else 0
        if self.has_l2_norm:
            query, key = map(self._normalized, (query, key))
        if self.growth and tokens + self.offset > self.span:
            positions = document_positions(query, documents) if documents is not None else self._positions(query)
            multiples = (positions + self.offset) // self.span
            query = query * (1 + self.growth * torch.log1p(multiples)).to(query.dtype)[..., None, None]
        if size := self.rotated_size:  # the factors of a product of rotated dimensions, without those that aren't
            query = torch.cat((query[..., :size] * self.rotated_factor, query[..., size:]), -1)
        settings = self.softmax_scale, window, self.softcap, self.softmax_offset
        chunk = self.chunk if self.chunk < tokens else 0
        if chunk and documents is not None:
            raise NotImplementedError("attention within chunks is not supported within documents")
        if chunk:  # each is a document
            positions = (torch.arange(tokens) % chunk).expand(query.size(1), tokens)
            documents = segment_bounds(positions, self.cp_group.rank(), self.cp_group.size()).to(query.device)
        if documents is not None:
            return attend_within_documents(query, key, value, documents, self.cp_group, *settings)
        if self.cp_group.size() > 1 and (window or self.softcap):
            return attend_by_chunks(query, key, value, self.cp_group, *settings).flatten(2)
        if self.cp_group.size() > 1:
            scale, sinks = self.softmax_scale, self.softmax_offset
            return attend_across_ranks(query, key, value, self.cp_group, scale, sinks).flatten(2)
        q, k, v = map(_heads_first, (query, key, value))
        return _tokens_first(attend_causally(q, k, v, *settings)).flatten(2)

    def _normalized(self, heads: Tensor) -> Tensor:
        """RMSNorm of each head."""
        eps = self.config.layernorm_epsilon
        return torch.nn.functional.rms_norm(heads.float(), heads.shape[-1:], None, eps).to(heads.dtype)

    def _sinks(self) -> torch.nn.Parameter:
        """The weights [h], under the name that Megatron's and Transformer Engine's attention give them."""
        heads = self.config.num_attention_heads // self._tp_group.size()
        sinks = torch.empty(heads, dtype=self.config.params_dtype, device=torch.cuda.current_device())
        parameter = torch.nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork(), torch.no_grad():
                self.config.init_method(parameter)
        return parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks of all ranks are one tensor."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self._tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def _positions(self, query: Tensor) -> Tensor:
        """The positions [s, 1] of a rank's tokens in their sequences."""
        ranks, length = self.cp_group.size(), query.size(0)
        chunks = chunks_of(self.cp_group.rank(), ranks)
        chunk = length // len(chunks)
        starts = torch.tensor(chunks, device=query.device) * chunk
        return (starts[:, None] + torch.arange(chunk, device=query.device)).flatten()[:, None]


def attend_by_chunks(
    query: Tensor,  # [s, b, h, d]: s tokens on this rank, an even number
    key: Tensor,  # [s, b, g, d], h a multiple of g
    value: Tensor,  # [s, b, g, d]
    group: distributed.ProcessGroup,
    scale: float | None,
    window: int,
    softcap: float,
    sinks: Tensor | None,  # [h]
) -> Tensor:  # [s, b, h, d]
    """Attention among all ranks' tokens of the sequence, with the settings of `attend_causally`."""
    outs = []
    for part, (keys, values) in zip(query.chunk(2), keys_of_chunks(key, value, group, window), strict=True):
        q, k, v = map(_heads_first, (part, keys, values))
        outs.append(_tokens_first(attend_causally(q, k, v, scale, window, softcap, sinks)))
    return torch.cat(outs)


def attend_across_ranks(
    query: Tensor,  # [s, b, h, d]: s tokens on this rank, an even number
    key: Tensor,  # [s, b, g, d], h a multiple of g
    value: Tensor,  # [s, b, g, d]
    group: distributed.ProcessGroup,
    scale: float | None = None,
    sinks: Tensor | None = None,  # [h]: one more score of each head, of no token
) -> Tensor:  # [s, b, h, d]
    """Each token attends to itself and to all earlier tokens of the sequence."""
    out: Tensor = _AcrossRanks.apply(query, key, value, group, scale, sinks)
    return out


class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: distributed.ProcessGroup,
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        own_kv = torch.stack((key, value))
        all_kv = own_kv.new_empty((group.size(), *own_kv.shape))  # [n, 2, s, b, g, d]
        pending = distributed.all_gather_into_tensor(all_kv.flatten(0, 1), own_kv, group=group, async_op=True)
        block = _block(query, *own_kv, causal=True, scale=scale)
        kernel = block_kernel(block)
        out, lse, rng_state = kernel.forward(block)
        pending.wait()
        merged = out.float()
        for first, kv in _others(all_kv, group.rank()):
            out, new_lse, _ = kernel.forward(_block(query[first:], *kv.flatten(1, 2), causal=False, scale=scale))
            old_lse = lse[:, :, first:]
            merged[:, :, first:].lerp_(out.float(), torch.sigmoid(new_lse - old_lse).unsqueeze(-1))
            torch.logaddexp(old_lse, new_lse, out=old_lse)
        if sinks is not None:
            merged, lse = with_sinks(merged, lse, sinks)
        out = _tokens_first(merged.to(query.dtype))
        context.save_for_backward(query, all_kv, out, lse, sinks)
        context.kernel, context.rng_state, context.group, context.scale = kernel, rng_state, group, scale
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, all_kv, out, lse, sinks = context.saved_tensors
        rank = context.group.rank()

        def gradients(first: int, kv: Tensor, *, causal: bool) -> list[Tensor]:
            """Gradients of the queries from `first` on, and of the keys and values [2, t, b, g, d] they attend to."""
            block = _block(query[first:], *kv, causal=causal, scale=context.scale)
            outs = _heads_first(grad[first:]), _heads_first(out[first:]), lse[:, :, first:].contiguous()
            return [_tokens_first(tensor) for tensor in context.kernel.backward(block, *outs, context.rng_state)]

        grad_query, grad_all_kv = torch.zeros_like(query), torch.zeros_like(all_kv)
        for (first, kv), (_, grad_kvs) in zip(_others(all_kv, rank), _others(grad_all_kv, rank), strict=True):
            queries, *grads = gradients(first, kv.flatten(1, 2), causal=False)
            grad_query[first:] += queries
            for target, values in zip(grad_kvs, grads, strict=True):
                target.copy_(values.unflatten(0, target.shape[:2]))
        grad_kv = torch.empty_like(all_kv[0])  # the other ranks' share of the gradients of this rank's keys and values
        pending = distributed.reduce_scatter_tensor(
            grad_kv, grad_all_kv.flatten(0, 1), group=context.group, async_op=True
        )
        queries, keys, values = gradients(0, all_kv[rank], causal=True)
        grad_query += queries
        of_sinks = None if sinks is None else gradient_of_sinks(sinks, _heads_first(grad), _heads_first(out), lse)
        pending.wait()
        return grad_query, grad_kv[0] + keys, grad_kv[1] + values, None, None, of_sinks


def _block(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> AttentionBlock:
    return AttentionBlock(_heads_first(query), _heads_first(key), _heads_first(value), causal, scale)


def _others(all_kv: Tensor, rank: int) -> list[tuple[int, Tensor]]:
    """Views of the other ranks' keys and values: the first query that attends to them, and [2, ranks, t, b, g, d]."""
    half = all_kv.size(2) // 2
    views = [(0, all_kv[:rank, :, :half]), (half, all_kv[rank + 1 :])]
    return [(first, kv.transpose(0, 1)) for first, kv in views if kv.size(0)]


def _heads_first(tensor: Tensor) -> Tensor:
    """[s, b, heads, d] as [b, heads, s, d]."""
    return tensor.permute(1, 2, 0, 3)


def _tokens_first(tensor: Tensor) -> Tensor:
    """[b, heads, s, d] as [s, b, heads, d]."""
    return tensor.permute(2, 0, 1, 3)
