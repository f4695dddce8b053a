"""Causal self-attention on torch's scaled_dot_product_attention, right under TP, SP, PP and CP.

It takes the place of Transformer Engine's DotProductAttention in Megatron's layer spec. It never builds a
mask over a whole batch: torch picks the flash or cuDNN kernel by itself for plain causal attention. Attention
that is reset at documents' ends is document_attention's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from pretrainkit.training.document_attention import attend_within_documents


class ScaledDotProductAttention(MegatronModule):
    """Core attention of one layer on one rank.

    Letters below: s tokens on this rank, b batch, h query heads and g key/value heads on this rank, d head size.
    With context parallelism of n ranks a sequence is cut into 2n chunks and rank r holds chunks r and
    2n-1-r (Megatron's balanced order), so s is two chunks.

    It has no entry in checkpoints, as Transformer Engine's attention has none in Megatron.
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
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attn_mask_type != AttnMaskType.causal or dropout or config.window_size:
            raise NotImplementedError(
                f"only causal attention without dropout and windows; asked for {attn_mask_type}, "
                f"dropout {dropout}, window {config.window_size}"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.softmax_scale = softmax_scale

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
        """Attend to all earlier tokens, or, with `attention_mask`, to those of the same document.

        `attention_mask` is None or the bounds of the microbatch's documents (see document_attention); a mask of
        another shape, as Megatron's inference code makes it, is not read: attention is causal by construction.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("packed sequences and attention biases need Transformer Engine")
        if attention_mask is not None and attention_mask.dim() == 1:
            if self.cp_group.size() > 1:
                raise NotImplementedError("attention within documents is not there for context parallelism")
            return attend_within_documents(query, key, value, attention_mask, self.softmax_scale)
        if self.cp_group.size() == 1:
            return self._attend(query, key, value, mask=None)
        key, value = self._whole_sequence(key), self._whole_sequence(value)
        rank, last = self.cp_group.rank(), 2 * self.cp_group.size() - 1
        parts = [
            self._attend_chunk(chunk, key, value, index)
            for chunk, index in zip(query.chunk(2, dim=0), (rank, last - rank), strict=True)
        ]
        return torch.cat(parts, dim=0)

    def _whole_sequence(self, local: Tensor) -> Tensor:
        """All ranks' keys or values in the order of the sequence; the gradient is summed back over the ranks."""
        gathered = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=True, group=self.cp_group)
        chunks = gathered.chunk(2 * self.cp_group.size(), dim=0)  # rank r's pair stands at 2r and 2r + 1
        return torch.cat(chunks[0::2] + chunks[1::2][::-1], dim=0)

    def _attend_chunk(self, query: Tensor, key: Tensor, value: Tensor, index: int) -> Tensor:
        """Chunk `index` of the sequence attends to the chunks before it, and causally to itself."""
        length = query.size(0)
        visible = (index + 1) * length
        # On GPU this is the flash kernel's own alignment; elsewhere torch makes the mask of length x visible.
        mask = causal_lower_right(length, visible) if index else None
        return self._attend(query, key[:visible], value[:visible], mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),  # [b, h, s, d]
            key.permute(1, 2, 0, 3),  # [b, g, s, d]
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.permute(2, 0, 1, 3).flatten(2)
