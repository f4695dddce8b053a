"""Parameters of a model, and the floating-point operations of training it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.family import Layout
from pretrainkit.models.registry import family_named


def parameters(shape: ModelShape, padded_vocab_size: int = 0) -> int:
    """Parameters of the whole model, all experts included; with the padding rows of its vocabulary, if it is padded."""
    padding, total = max(padded_vocab_size - shape.vocab_size, 0) * shape.hidden_size, 0
    for weight in family_named(shape.family).weights(shape):
        numel = sum(math.prod(size) for size in weight.shapes)
        layers = sum(map(weight.is_in, range(shape.num_layers))) if weight.per_layer else 1
        repeats = layers * (shape.num_experts if weight.per_expert else 1)
        total += numel * repeats + (padding if weight.layout is Layout.VOCABULARY else 0)
    return total


def active_parameters(shape: ModelShape, padded_vocab_size: int = 0) -> int:
    """Of these, the ones that a token meets."""
    idle = max(shape.num_experts - shape.experts_per_token, 0)
    return parameters(shape, padded_vocab_size) - len(shape.expert_layers) * idle * expert_parameters(shape)


def expert_parameters(shape: ModelShape) -> int:
    """Of one expert of a layer."""
    rows = [weight for weight in family_named(shape.family).weights(shape) if weight.per_expert]
    return sum(math.prod(size) for weight in rows for size in weight.shapes)


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters of the matrix products of a token: no input embedding, no norms, only its active experts."""
    sparse = len(shape.expert_layers)
    dense = layer_parameters(shape, is_dense=True) * (shape.num_layers - sparse)
    others = other_attention_parameters(shape, range(shape.num_layers))
    return dense + sparse * layer_parameters(shape) + others + shape.hidden_size * shape.vocab_size


def other_attention_parameters(shape: ModelShape, layers: Iterable[int]) -> int:
    """What those of these layers that have another attention have more than `attention_parameters`."""
    kept, nets, wide = set(layers), set(shape.features.delta_net_layers), shape.features.global_attention
    more = len(kept & nets) * (delta_net_parameters(shape) - attention_parameters(shape))
    if wide:
        others = attention_parameters(with_global_heads(shape))
        others -= wide.keys_are_values * shape.hidden_size * wide.head_dim * wide.num_query_groups
        more += len(kept & set(shape.global_layers)) * (others - attention_parameters(shape))
    return more


def with_global_heads(shape: ModelShape) -> ModelShape:
    """The shape with the heads of layers that aren't local in all of them."""
    wide = shape.features.global_attention
    return replace(shape, head_dim=wide.head_dim, num_query_groups=wide.num_query_groups) if wide else shape


def delta_net_parameters(shape: ModelShape) -> int:
    """Of a gated delta net, in the place of those of attention."""
    if (net := shape.features.delta_net) is None:
        return 0
    keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
    return shape.hidden_size * (2 * keys + 3 * values + 2 * net.num_value_heads)


def layer_parameters(shape: ModelShape, *, is_dense: bool = False) -> int:
    """The share of one layer in `matmul_parameters`: with experts where the model has them, unless it `is_dense`."""
    mlp = (3 if shape.features.is_gated else 2) * shape.hidden_size * shape.ffn_hidden_size
    if shape.num_experts and not is_dense:
        router = shape.hidden_size * shape.num_experts
        visited = shape.expert_ffn_hidden_size * shape.experts_per_token + shape.shared_expert_ffn_hidden_size
        mlp = 3 * shape.hidden_size * visited + router
    return attention_parameters(shape) + mlp


def attention_parameters(shape: ModelShape) -> int:
    """Of them those of attention."""
    heads, hidden, latent = shape.num_attention_heads, shape.hidden_size, shape.features.latent_attention
    if latent is None:
        return hidden * shape.head_dim * ((3 if shape.features.output_gate else 2) * heads + 2 * shape.num_query_groups)
    rank, rotated, of_heads = latent.q_lora_rank, latent.qk_rope_head_dim, heads * shape.head_dim
    queries = rank * (hidden + of_heads) if rank else hidden * of_heads
    keys = latent.kv_lora_rank * (hidden + of_heads - heads * rotated) + hidden * rotated
    return queries + keys + heads * latent.v_head_dim * (latent.kv_lora_rank + hidden)


def value_head_dim(shape: ModelShape) -> int:
    """The size of each head's value."""
    latent = shape.features.latent_attention
    return latent.v_head_dim if latent else shape.head_dim


def training_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 N + 6 L H S.

    N: matmul_parameters; 2 FLOPs each forward, 4 backward. L layers, H = heads x head size (with latent attention the
    mean of queries' and values'), S tokens: causal attention, in which a token attends to half the sequence on average,
    and to less in layers with a window.
    Recomputation is not counted, so that MFU = this x tokens/s / peak compares implementations
    (https://arxiv.org/abs/2204.02311, appendix B, with causal attention halved).
    """
    window, local = shape.features.sliding_window, shape.features.local_layers
    seen = [sequence_length / 2] * shape.num_layers  # tokens that a token attends to, by layer
    chunk = shape.features.attention_chunk
    for layer in local:
        if 0 < window < sequence_length:
            seen[layer] = window - window**2 / (2 * sequence_length)
        if 0 < chunk < sequence_length:
            seen[layer] = chunk / 2
    for layer in shape.features.delta_net_layers:  # whose state's products are few
        seen[layer] = 0
    head_dims = [shape.head_dim + value_head_dim(shape)] * shape.num_layers
    if wide := shape.features.global_attention:
        for layer in shape.global_layers:
            head_dims[layer] = 2 * wide.head_dim
    products = sum(size * tokens for size, tokens in zip(head_dims, seen, strict=True))
    return 6 * matmul_parameters(shape) + 6 * shape.num_attention_heads * products
