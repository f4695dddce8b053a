"""Multi-head latent attention (`layer_features.LatentAttention`) from torch modules, without Transformer Engine.

Megatron-core's MLASelfAttention (0.16.1) can't be built without it. Its down-projections would then be split over
tensor-parallel ranks and gathered, which gives the rotated part of keys, which all heads share, the gradient of a
rank's own heads alone. Here every rank has them whole, as with Transformer Engine, and parameters have the same names.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.linear import RMSNormColumnParallelLinear


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank has whole, for its own tokens."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        settings: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **settings))
        self.weight.sequence_parallel = config.sequence_parallel  # Megatron sums these gradients over TP ranks
        if config.perform_initialization:
            with torch.no_grad():
                config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class LatentSelfAttention(MegatronModule):
    """The attention of one layer on one rank.

    Letters below: t tokens on this rank, a part of its s tokens with sequence parallelism; b batch, h heads on this
    rank, q and k sizes of the latent vectors, r rotated dimensions, d size of a head's query and key, v of its value.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        features: LayerFeatures,
        rotary_factor: float,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        """`rotary_factor` is YaRN's factor of rotated dimensions."""
        super().__init__(config=config)
        latent, heads, hidden = features.latent_attention, config.num_attention_heads, config.hidden_size
        assert latent and (config.sequence_parallel or pg_collection.tp.size() == 1)
        self._latent, self._rotary_factor, self._groups = latent, rotary_factor, pg_collection
        self._head_dim = config.kv_channels
        rank, kept, rotated = latent.q_lora_rank, latent.kv_lora_rank, latent.qk_rope_head_dim
        inner = copy.copy(config)
        inner.layernorm_epsilon = latent.norm_eps

        def up(num_in: int, size: int, *, has_norm: bool) -> RMSNormColumnParallelLinear:
            settings = {"config": inner, "init_method": config.init_method, "tp_group": pg_collection.tp}
            return RMSNormColumnParallelLinear(
                num_in, heads * size, bias=False, has_norm=has_norm, gather_output=False, **settings
            )

        if rank:
            self.linear_q_down_proj = ReplicatedLinear(hidden, rank, config)
            self.linear_q_up_proj = up(rank, self._head_dim, has_norm=True)
        else:
            self.linear_q_proj = up(hidden, self._head_dim, has_norm=False)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, kept + rotated, config)
        self.linear_kv_up_proj = up(kept, self._head_dim - rotated + latent.v_head_dim, has_norm=True)
        self.core_attention = ScaledDotProductAttention(
            config, layer_number, attn_mask_type, "self", pg_collection=pg_collection, features=features
        )
        self.linear_proj = RowParallelLinear(
            heads * latent.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [t, b, H] to [t, b, H]; `rotary_pos_emb` are the angles [s, 1, 1, r]."""
        latent = self._latent
        if latent.q_lora_rank:
            queries, _ = self.linear_q_up_proj(self.linear_q_down_proj(hidden))
        else:
            queries, _ = self.linear_q_proj(hidden)
        query = queries.unflatten(-1, (-1, self._head_dim))  # [s, b, h, d]
        fixed = self._head_dim - latent.qk_rope_head_dim
        compressed, rotated = self.linear_kv_down_proj(hidden).split((latent.kv_lora_rank, latent.qk_rope_head_dim), -1)
        keys_values, _ = self.linear_kv_up_proj(compressed)
        key, value = keys_values.unflatten(-1, (-1, fixed + latent.v_head_dim)).split((fixed, latent.v_head_dim), -1)
        if self.config.sequence_parallel:
            rotated = gather_from_sequence_parallel_region(rotated, group=self._groups.tp)
        rotated = self._rotate(rotated.unsqueeze(2), rotary_pos_emb).expand(*key.shape[:3], -1)
        query = torch.cat((query[..., :fixed], self._rotate(query[..., fixed:], rotary_pos_emb)), -1)
        return self.linear_proj(self._attend(query, torch.cat((key, rotated), -1), value, attention_mask))

    def _rotate(self, part: Tensor, angles: Tensor | None) -> Tensor:
        rotated: Tensor = apply_rotary_pos_emb(
            part, angles, config=self.config, mscale=self._rotary_factor, cp_group=self._groups.cp
        )
        return rotated

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[s, b, h, d], [s, b, h, d] and [s, b, h, v] to [s, b, h * v]."""
        if self._groups.cp.size() == 1:
            return self.core_attention(query, key, value, attention_mask)
        # Ranks send keys and values in one tensor.
        filled = F.pad(value, (0, self._head_dim - value.size(-1)))
        out = self.core_attention(query, key, filled, attention_mask).unflatten(-1, (-1, self._head_dim))
        return out[..., : value.size(-1)].flatten(2)
