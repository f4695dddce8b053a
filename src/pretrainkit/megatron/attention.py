"""Causal self-attention on torch's scaled_dot_product_attention, correct under TP, SP, PP and CP.

It replaces Transformer Engine's DotProductAttention in Megatron's layer spec. No S x S mask is built: torch selects its
flash or cuDNN kernel for causal attention. Attention that is reset at document boundaries is in document_attention,
attention under context parallelism in cp_attention.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.megatron.cp_attention import attend_across_ranks
from pretrainkit.megatron.document_attention import attend_within_documents


class ScaledDotProductAttention(MegatronModule):
    """Core attention of one layer on one rank.

    Letters below: s tokens on this rank, b batch, h query heads and g key/value heads on this rank, d head size.
    It has no entry in checkpoints; Transformer Engine's attention has none in Megatron either.
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
                f"only causal attention without dropout and windows is supported; found {attn_mask_type}, "
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
        """Attend to all earlier tokens or, with `attention_mask`, to those of the same document.

        `attention_mask` is None or the bounds of the microbatch's documents (see document_attention); a mask of
        another shape, such as that of Megatron's inference code, is ignored: attention is always causal.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("packed sequences and attention biases need Transformer Engine")
        if attention_mask is not None and attention_mask.dim() == 1:
            if self.cp_group.size() > 1:
                raise NotImplementedError("attention within documents is not supported with context parallelism")
            return attend_within_documents(query, key, value, attention_mask, self.softmax_scale)
        if self.cp_group.size() > 1:
            return attend_across_ranks(query, key, value, self.cp_group, self.softmax_scale).flatten(2)
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),  # [b, h, s, d]
            key.permute(1, 2, 0, 3),  # [b, g, s, d]
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.permute(2, 0, 1, 3).flatten(2)
