"""Gated delta nets (`layer_features.DeltaNet`) and attention with a gate of its output, from torch modules.

Megatron-core's GatedDeltaNet asks for flash-linear-attention, which needs a GPU and Triton; `delta_rule` does not.
Every tensor-parallel rank has some key heads, with the value heads of each. It has small weights whole, uses
those of its heads, and their gradients are summed over ranks: by Megatron under sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.megatron.delta_rule import gated_delta_rule
from pretrainkit.megatron.linear import RMSNormColumnParallelLinear


class GatedQueryLinear(RMSNormColumnParallelLinear):
    """The projection of a layer whose query heads each have a gate behind them, as Hugging Face stores them.

    Megatron's attention takes a group's query heads, then its gates, its key and its value.
    """

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(hidden, *args, **kwargs)
        config = self.config
        per_group = config.num_attention_heads // config.num_query_groups
        heads = output.unflatten(-1, (-1, 2 * per_group + 2, config.kv_channels))
        queries, gates = heads[..., 0 : 2 * per_group : 2, :], heads[..., 1 : 2 * per_group : 2, :]
        return torch.cat((queries, gates, heads[..., 2 * per_group :, :]), -2).flatten(-3), bias


class GatedDeltaNet(MegatronModule):
    """The linear attention of one layer on one rank (arXiv:2412.06464); must agree with transformers' Qwen3-Next.

    Letters below: t tokens on this rank, a part of its s tokens with sequence parallelism; b batch, k key heads and v
    value heads on this rank, c channels of the convolution.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        features: LayerFeatures,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config=config)
        net, hidden, self._tp = features.delta_net, config.hidden_size, pg_collection.tp
        assert net and pg_collection.cp.size() == 1
        self._net = net
        keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim

        def column(num_out: int) -> RMSNormColumnParallelLinear:
            settings = {"config": config, "init_method": config.init_method, "tp_group": self._tp}
            return RMSNormColumnParallelLinear(
                hidden, num_out, bias=False, has_norm=False, gather_output=False, **settings
            )

        self.in_proj_qkvz = column(2 * keys + 2 * values)
        self.in_proj_ba = column(2 * net.num_value_heads)
        self.conv1d = torch.nn.Module()
        self.conv1d.weight = self._whole(torch.rand(2 * keys + values, 1, net.kernel_size) - 0.5)
        self.dt_bias = self._whole(torch.ones(net.num_value_heads))
        self.A_log = self._whole(torch.empty(net.num_value_heads).uniform_(0.01, 16).log())
        self.norm = torch.nn.Module()
        self.norm.weight = self._whole(torch.ones(net.value_head_dim))
        self.out_proj = RowParallelLinear(
            values,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self._tp,
        )

    def _whole(self, values: Tensor) -> torch.nn.Parameter:
        """A weight that every rank has whole."""
        weight = torch.nn.Parameter(values.to(dtype=self.config.params_dtype, device=torch.cuda.current_device()))
        weight.sequence_parallel = self.config.sequence_parallel
        return weight

    def _used(self, weight: Tensor) -> Tensor:
        """A whole weight, of whose gradient each rank has a part: without sequence parallelism this sums them."""
        used: Tensor = weight if self.config.sequence_parallel else copy_to_tensor_model_parallel_region(weight)
        return used

    def _own(self, weight: Tensor) -> Tensor:
        """The part of a weight that belongs to this rank's heads."""
        return self._used(weight).chunk(self._tp.size())[self._tp.rank()]

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """hidden [t, b, H] to [t, b, H]."""
        if attention_mask is not None and attention_mask.dim() == 2:
            raise NotImplementedError("gated delta nets are not supported within documents")
        net, (projected, _), (rates, _) = self._net, self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        per_key = net.num_value_heads // net.num_key_heads
        sizes = [net.key_head_dim] * 2 + [per_key * net.value_head_dim] * 2
        projected = projected.transpose(0, 1).unflatten(-1, (-1, sum(sizes)))  # [b, s, k, ...]
        *inputs, gate = projected.split(sizes, -1)
        beta, decay = (part.flatten(2) for part in rates.transpose(0, 1).unflatten(-1, (-1, 2 * per_key)).chunk(2, -1))
        query, key, value = self._convolved([part.flatten(2) for part in inputs])
        query, key = (part.unflatten(-1, (-1, net.key_head_dim)) for part in (query, key))  # [b, s, k, d]
        value = value.unflatten(-1, (-1, net.value_head_dim))  # [b, s, v, e]
        log_decay = -self._own(self.A_log).float().exp() * F.softplus(decay.float() + self._own(self.dt_bias))
        out = gated_delta_rule(query, key, value, log_decay, beta.sigmoid())
        out = F.rms_norm(out.float(), out.shape[-1:], None, self.config.layernorm_epsilon).to(out.dtype)
        gate = F.silu(gate.reshape(out.shape).float())
        out = (self._used(self.norm.weight) * out * gate).to(hidden.dtype)
        return self.out_proj(out.flatten(2).transpose(0, 1).contiguous())

    def _convolved(self, parts: list[Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values [b, s, c] after a causal convolution of each channel."""
        net = self._net
        rows = [net.num_key_heads * net.key_head_dim] * 2 + [net.num_value_heads * net.value_head_dim]
        kernel = torch.cat([self._own(part) for part in self.conv1d.weight.split(rows)])  # [c, 1, kernel size]
        channels = F.pad(torch.cat(parts, -1).transpose(1, 2), (net.kernel_size - 1, 0))
        out = F.silu(F.conv1d(channels, kernel, groups=len(kernel))).transpose(1, 2)
        return out.split([part.size(-1) for part in parts], -1)
