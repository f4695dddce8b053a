"""The features of layers (`config.layer_features`) in Megatron-core's terms: config fields, modules, rotary embeddings.

`layer_spec` puts the modules into a layer; `finish_model` adds what is around the layers. A norm after a block is
called `post_layernorm` and belongs to the block's last linear layer, as in NeMo's Gemma.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.config.schema import RopeScaling
from pretrainkit.megatron import routing
from pretrainkit.megatron.linear import RMSNorm, RMSNormColumnParallelLinear


def config_fields(features: LayerFeatures, num_layers: int) -> dict[str, Any]:
    """The fields of TransformerConfig for the features that it knows."""
    without, dense = features.nope_layers, features.dense_layers
    return {
        **({"moe_layer_freq": [int(layer not in dense) for layer in range(num_layers)]} if dense else {}),
        **(routing.config_fields(features.routing) if features.routing else {}),
        # Megatron's name for checkpoints in which each layer has tensors of its own.
        **({"hetereogenous_dist_checkpoint": True} if features.delta_net_layers or features.global_attention else {}),
        "attention_output_gate": features.output_gate,
        "activation_func": functools.partial(F.gelu, approximate="tanh") if features.activation == "gelu" else F.silu,
        "gated_linear_unit": features.is_gated,
        "use_te_activation_func": features.activation == "xielu",  # an activation that is a module: Xielu
        "layernorm_zero_centered_gamma": features.zero_centered_norm,
        "no_rope_freq": [int(layer in without) for layer in range(num_layers)] if without else None,
        "rotary_interleaved": features.rotary_interleaved,
    }


class BlockOutputLinear(RowParallelLinear):
    """A block's last linear layer, and what is done to its output before it is added to the residual stream."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        features: LayerFeatures,
        has_bias: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, output_size, config=config, bias=bias or has_bias, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size) if features.norm_after else None
        self._multiplier = features.residual_multiplier

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        output, bias = super().forward(input_)
        if bias is not None:
            output = output + bias
        if self.post_layernorm is not None:
            output = self.post_layernorm(output)
        return output * self._multiplier if self._multiplier != 1 else output, None


class Xielu(MegatronModule):
    """xIELU (arXiv:2411.13010) with two weights of a layer; must agree with transformers' XIELUActivation.

    Its constants are buffers with one element: Hugging Face's checkpoints have them.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        settings: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        inverse_softplus = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
        for name, value in inverse_softplus.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor([value], **settings)))
        self.register_buffer("beta", torch.tensor([0.5], **settings))
        self.register_buffer("eps", torch.tensor([-1e-6], **settings))

    def forward(self, inputs: Tensor) -> Tensor:
        # Each tensor-parallel rank has the gradient of its part of the MLP's rows: this sums them.
        alpha_p, alpha_n = map(copy_to_tensor_model_parallel_region, (self.alpha_p, self.alpha_n))
        positive, negative = F.softplus(alpha_p), self.beta + F.softplus(alpha_n)
        below = (torch.expm1(torch.minimum(inputs, self.eps)) - inputs) * negative
        return torch.where(inputs > 0, positive * inputs * inputs, below) + self.beta * inputs


class RMSNormOverHeads(RMSNorm):
    """The norm of queries or keys over all heads, of which each tensor-parallel rank has some.

    Every rank has the whole weight and uses the part of its heads, so that Megatron's sum of these gradients over ranks
    is right: it sums those of all norms of queries and keys.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, *, num_heads: int, **_: Any) -> None:
        super().__init__(config, num_heads * hidden_size)

    def forward(self, heads: Tensor) -> Tensor:  # [s, b, heads on this rank, d]
        group, (count, size) = parallel_state.get_tensor_model_parallel_group(), heads.shape[-2:]
        wide = heads.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if group.size() > 1:
            squares = all_reduce(squares, group=group)
        normed = wide * torch.rsqrt(squares / self.weight.numel() + self.config.layernorm_epsilon)
        weight = self.weight.view(-1, size).narrow(0, group.rank() * count, count)
        return (normed * weight).to(heads.dtype)


class LocalSelfAttention(SelfAttention):
    """Attention of a model whose local layers have their own rotary embeddings (`LocalRotaryEmbedding`).

    The others may have other heads (`GlobalAttention`), and all of them norms of values.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, layer_number: int, features: LayerFeatures, **kwargs: Any
    ) -> None:
        self._kind = int(layer_number - 1 in features.local_layers)
        if (other := features.global_attention) and not self._kind:
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = other.head_dim, other.num_query_groups
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        self._has_value_norm = features.value_norm

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        embedding = None if rotary_pos_emb is None else rotary_pos_emb[self._kind, ..., : self.config.kv_channels]
        return super().forward(hidden_states, *args, rotary_pos_emb=embedding, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._has_value_norm:
            value = F.rms_norm(value.float(), value.shape[-1:], None, self.config.layernorm_epsilon).to(value.dtype)
        return query, key, value, *rest


class KeysAsValuesLinear(RMSNormColumnParallelLinear):
    """The projection of queries and keys, which are values, too: each group's output has its key twice."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        self._group = config.num_attention_heads // config.num_query_groups + 1, config.kv_channels
        super().__init__(input_size, config.num_query_groups * math.prod(self._group), config=config, **kwargs)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(hidden, *args, **kwargs)
        heads = output.unflatten(-1, (-1, *self._group))
        return torch.cat((heads, heads[..., -1:, :]), -2).flatten(-3), bias


class ScalarTransformerLayer(TransformerLayer):
    """A layer whose output is multiplied by a number of its checkpoint."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        ones = torch.ones(1, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.register_buffer("layer_scalar", ones)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, context = super().forward(*args, **kwargs)
        return output * self.layer_scalar, context


class LocalRotaryEmbedding(torch.nn.Module):
    """Two rotary embeddings [2, s, 1, 1, d]: of the other layers, and of the local ones.

    Where the heads of the other layers are larger, what is behind a local one's is zeros.
    """

    def __init__(self, other: RotaryEmbedding, local: RotaryEmbedding) -> None:
        super().__init__()
        self._other, self._local = other, local
        self.get_rotary_seq_len = other.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        other, local = self._other(*args, **kwargs), self._local(*args, **kwargs)
        return torch.stack([other, F.pad(local, (0, other.size(-1) - local.size(-1)))])


class LengthRotaryEmbedding(torch.nn.Module):
    """The rotary embedding of sequences of up to so many tokens, or that of longer ones."""

    def __init__(self, short: RotaryEmbedding, long: RotaryEmbedding, longest: int) -> None:
        super().__init__()
        self._short, self._long, self._longest = short, long, longest
        self.get_rotary_seq_len = short.get_rotary_seq_len

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        chosen = self._long if max_seq_len > self._longest else self._short
        embedding: Tensor = chosen(max_seq_len, *args, **kwargs)
        return embedding


def finish_model(
    model: GPTModel, *, rope_theta: float, rope_scaling: RopeScaling | None, features: LayerFeatures
) -> GPTModel:
    """Give a model of Megatron-core, of one pipeline stage, what its family has around the layers."""

    latent = features.latent_attention
    size = latent.qk_rope_head_dim if latent else model.config.kv_channels

    def rotary(base: float, scaling: RopeScaling | None, size: int = size) -> RotaryEmbedding:
        embedding = RotaryEmbedding(
            kv_channels=size,
            rotary_percent=features.rotary_fraction,
            rotary_interleaved=features.rotary_interleaved,
            rotary_base=base,
            cp_group=model.pg_collection.cp,
        )
        if scaling:
            embedding.inv_freq = scaled_inverse_frequencies(embedding.inv_freq, scaling, base)
        return embedding

    def whole(base: float, scaling: RopeScaling | None) -> torch.nn.Module:
        if scaling is None or scaling.kind != "longrope":
            return rotary(base, scaling)
        long = dataclasses.replace(scaling, short_factor=scaling.long_factor)
        return LengthRotaryEmbedding(
            rotary(base, scaling), rotary(base, long), scaling.original_max_position_embeddings
        )

    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        if features.router_bias:
            router.bias = torch.nn.Parameter(torch.zeros_like(router.weight[:, 0]))
            router.bias.sequence_parallel = model.config.sequence_parallel
        if features.routing:
            routing.prepare_router(router, features.routing)
    if other := features.global_attention:
        model.rotary_pos_emb = rotary(rope_theta, None, other.head_dim)
        model.rotary_pos_emb.inv_freq[int(other.rotary_fraction * other.head_dim // 2) :] = 0
    else:
        model.rotary_pos_emb = whole(rope_theta, rope_scaling)
    if base := features.local_rope_theta:
        model.rotary_pos_emb = LocalRotaryEmbedding(model.rotary_pos_emb, rotary(base, None))
    if model.pre_process and (multiplier := features.embedding_multiplier) != 1:
        # In the embedding's dtype, as transformers rounds it.
        model.embedding.register_forward_hook(lambda _, __, out: out * torch.tensor(multiplier, dtype=out.dtype))
    if model.post_process and (divisor := features.logits_divisor) != 1:
        model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] / divisor, *inputs[1:]))
    if model.post_process and (cap := features.logits_softcap):
        model.output_layer.register_forward_hook(lambda _, __, out: (cap * torch.tanh(out[0] / cap), *out[1:]))
    return model


def scaled_inverse_frequencies(inverse_frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Scaled rotary inverse frequencies [rotated dimensions / 2], in radians per token.

    They must agree with transformers: modeling_rope_utils.
    """
    scales = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic, "longrope": _longrope}
    return scales[scaling.kind](inverse_frequencies, scaling, base)


def _linear(inverse_frequencies: Tensor, scaling: RopeScaling, _: float) -> Tensor:
    return inverse_frequencies / scaling.factor


def _dynamic(inverse_frequencies: Tensor, _: RopeScaling, __: float) -> Tensor:
    """Sequences that are longer than the context length are scaled, which nothing here computes."""
    return inverse_frequencies


def _longrope(inverse_frequencies: Tensor, scaling: RopeScaling, _: float) -> Tensor:
    return inverse_frequencies / torch.tensor(scaling.short_factor, device=inverse_frequencies.device)


def _llama3(inverse_frequencies: Tensor, scaling: RopeScaling, _: float) -> Tensor:
    """Frequencies that turn less than `low_freq_factor` times in the old context are divided by `factor`, those that
    turn more than `high_freq_factor` times are kept, and those between are blended.
    """
    turns = scaling.original_max_position_embeddings * inverse_frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blended(inverse_frequencies, kept.clamp(0, 1), scaling.factor)


def _yarn(inverse_frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """As llama3, blended between whole numbers of a dimension: those that turn `beta_fast` and `beta_slow` times."""
    half = inverse_frequencies.numel()

    def dimension(turns: float) -> float:
        return half * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(base)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    numbers = torch.arange(half, dtype=torch.float32, device=inverse_frequencies.device)
    kept = 1 - ((numbers - low) / (high - low or 0.001)).clamp(0, 1)
    return _blended(inverse_frequencies, kept, scaling.factor)


def _blended(inverse_frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    return kept * inverse_frequencies + (1 - kept) * inverse_frequencies / factor
