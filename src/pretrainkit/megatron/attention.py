"""Causal self-attention on torch's scaled_dot_product_attention, right under TP, SP, PP and CP.

It takes the place of Transformer Engine's DotProductAttention in Megatron's layer spec. It never builds a
mask over a whole batch: torch picks the flash or cuDNN kernel by itself for plain causal attention. Attention
that is reset at documents' ends is document_attention's, and over ranks' tokens context_parallel_attention's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.megatron.attention_parts import Part, part_kernel
from pretrainkit.megatron.cp_attention import attend_across_ranks
from pretrainkit.megatron.document_attention import attend_within_documents

log = get_logger(__name__)
CUDNN_CARDS = (9, 10)
"""Major compute capabilities (Hopper, Blackwell) for which torch prefers cuDNN's kernel."""


def attention_kernel(run: ResolvedRun) -> str:
    """Name of the kernel that torch takes for this run's attention on this rank's device; warns of a slow one."""
    if run.accelerator == "cpu":
        return "cpu"
    if run.reset_attention_mask:
        return "flash"
    shape, tensor = run.model, run.config.parallel.tensor_model_parallel_size
    length = run.config.data.sequence_length // run.config.parallel.context_parallel_size
    heads = (shape.num_attention_heads // tensor, max(1, shape.num_query_groups // tensor))
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    q, k = (torch.empty((1, n, length, shape.head_dim), dtype=dtype, device="cuda", requires_grad=True) for n in heads)
    name = part_kernel(Part(q, k, k, causal=True, scale=None)).name
    if name != "cudnn" and dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in CUDNN_CARDS:
        slow = "torch's attention is its %s kernel; cuDNN's takes 0.6 of its time on such a card, but isn't taken: %s"
        log.warning(slow, name, _why_not_cudnn())
    return name


def _why_not_cudnn() -> str:
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # another library than torch's own was loaded before it, by a path or a package
        return str(error)
    return f"cuDNN {version}, see torch.backends.cuda.cudnn_sdp_enabled() and TORCH_CUDNN_SDPA_DEPRIORITIZED"


class ScaledDotProductAttention(MegatronModule):
    """Core attention of one layer on one rank.

    Letters below: s tokens on this rank, b batch, h query heads and g key/value heads on this rank, d head size.
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
