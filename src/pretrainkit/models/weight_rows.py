"""Rows of a weight table that families share: embedding, norms, attention, MLP and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.family import Layout, Weight

Rows = Callable[[ModelShape], tuple[Weight, ...]]
_MLP_NORM = "model.layers.{layer}.post_attention_layernorm"


def embedding(shape: ModelShape, megatron: str = "embedding.word_embeddings", hf: str = "model.embed_tokens") -> Weight:
    """The word embedding, or another matrix with a row per token id."""
    return Weight(f"{megatron}.weight", (f"{hf}.weight",), Layout.VOCABULARY, ((shape.vocab_size, shape.hidden_size),))


def norm(megatron: str, hf: str, size: int) -> Weight:
    """The weight of an RMSNorm."""
    return Weight(megatron, (f"{hf}.weight",), Layout.REPLICATED, ((size,),))


def head(shape: ModelShape) -> tuple[Weight, ...]:
    """The final norm, and the output layer unless it is the embedding."""
    final = norm("decoder.final_layernorm.weight", "model.norm", shape.hidden_size)
    return (final,) if shape.tie_word_embeddings else (final, embedding(shape, "output_layer", "lm_head"))


def attention(
    shape: ModelShape, before: str = "input_layernorm", after: str = "", fused: str = "", parts: str = "qkv"
) -> tuple[Weight, ...]:
    """Grouped-query attention with its norms, and with the biases and query/key norms that the shape has.

    `before` and `after` are the names of norms, `fused` that of the projection, where Hugging Face has one for all;
    `parts` are those that it has.
    """
    ours, theirs = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
    features, layer = shape.features, "model.layers.{layer}."
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    hidden, sizes = shape.hidden_size, (query * (1 + features.output_gate), key_value, key_value)

    def qkv(kind: str, shapes: tuple[tuple[int, ...], ...]) -> Weight:
        return Weight(
            f"{ours}linear_qkv.{kind}",
            (f"{theirs}{fused}.{kind}",) if fused else tuple(f"{theirs}{name}_proj.{kind}" for name in parts),
            Layout.QKV,
            shapes[: len(parts)],
            is_fused=bool(fused),
            groups=shape.num_query_groups,
        )

    def qk_norm(name: str, size: int) -> Weight:
        size = size if features.qk_norm_over_heads else shape.head_dim
        return norm(f"{ours}{name}_layernorm.weight", f"{theirs}{name}_norm", size)

    return (
        *([norm(ours + "linear_qkv.layer_norm_weight", layer + before, hidden)] if features.norm_before else []),
        qkv("weight", tuple((size, hidden) for size in sizes)),
        *([qkv("bias", tuple((size,) for size in sizes))] if shape.qkv_bias else []),
        *([qk_norm("q", query), qk_norm("k", key_value)] if shape.qk_norm else []),
        *linear(ours + "linear_proj", (theirs + "o_proj",), Layout.ROW, ((hidden, query),), features.output_bias),
        *([norm(ours + "linear_proj.post_layernorm.weight", layer + after, hidden)] if features.norm_after else []),
    )


def latent_attention(shape: ModelShape) -> tuple[Weight, ...]:
    """Multi-head latent attention with its norms, named as DeepSeek's models and Transformer Engine's layers do."""
    ours, theirs = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
    latent, hidden, heads = shape.features.latent_attention, shape.hidden_size, shape.num_attention_heads
    assert latent
    kept, rows = latent.kv_lora_rank, heads * (shape.head_dim - latent.qk_rope_head_dim + latent.v_head_dim)

    def matrix(megatron: str, hf: str, layout: Layout, num_out: int, num_in: int) -> Weight:
        return Weight(f"{ours}{megatron}.weight", (f"{theirs}{hf}.weight",), layout, ((num_out, num_in),))

    queries: tuple[Weight, ...] = (matrix("linear_q_proj", "q_proj", Layout.COLUMN, heads * shape.head_dim, hidden),)
    if rank := latent.q_lora_rank:
        queries = (
            matrix("linear_q_down_proj", "q_a_proj", Layout.REPLICATED, rank, hidden),
            norm(ours + "linear_q_up_proj.layer_norm_weight", theirs + "q_a_layernorm", rank),
            matrix("linear_q_up_proj", "q_b_proj", Layout.COLUMN, heads * shape.head_dim, rank),
        )
    return (
        norm("decoder.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.input_layernorm", hidden),
        *queries,
        matrix("linear_kv_down_proj", "kv_a_proj_with_mqa", Layout.REPLICATED, kept + latent.qk_rope_head_dim, hidden),
        norm(ours + "linear_kv_up_proj.layer_norm_weight", theirs + "kv_a_layernorm", kept),
        matrix("linear_kv_up_proj", "kv_b_proj", Layout.COLUMN, rows, kept),
        matrix("linear_proj", "o_proj", Layout.ROW, hidden, heads * latent.v_head_dim),
    )


def delta_net(shape: ModelShape) -> tuple[Weight, ...]:
    """A gated delta net with the norm before it; both sides have the order of Qwen3-Next."""
    ours, theirs, net = (
        "decoder.layers.{layer}.self_attention.",
        "model.layers.{layer}.linear_attn.",
        shape.features.delta_net,
    )
    assert net
    hidden, values = shape.hidden_size, net.num_value_heads * net.value_head_dim
    keys = net.num_key_heads * net.key_head_dim

    def row(name: str, layout: Layout, *size: int) -> Weight:
        return Weight(ours + name, (theirs + name,), layout, (size,))

    return (
        norm("decoder.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.input_layernorm", hidden),
        row("in_proj_qkvz.weight", Layout.COLUMN, 2 * keys + 2 * values, hidden),
        row("in_proj_ba.weight", Layout.COLUMN, 2 * net.num_value_heads, hidden),
        row("conv1d.weight", Layout.REPLICATED, 2 * keys + values, 1, net.kernel_size),
        row("dt_bias", Layout.REPLICATED, net.num_value_heads),
        row("A_log", Layout.REPLICATED, net.num_value_heads),
        row("norm.weight", Layout.REPLICATED, net.value_head_dim),
        row("out_proj.weight", Layout.ROW, hidden, values),
    )


def separate_delta_net(shape: ModelShape) -> tuple[Weight, ...]:
    """The same where Hugging Face has the projections apart, each in the order of heads (Qwen3.5)."""
    before, _, __, *others = delta_net(shape)
    net, ours = shape.features.delta_net, "decoder.layers.{layer}.self_attention."
    assert net
    theirs, hidden, groups = "model.layers.{layer}.linear_attn.in_proj_", shape.hidden_size, net.num_key_heads
    keys, values, heads = (
        (count, hidden)
        for count in (groups * net.key_head_dim, net.num_value_heads * net.value_head_dim, net.num_value_heads)
    )
    qkvz = tuple(f"{theirs}{name}.weight" for name in ("qkv", "z"))
    ba = tuple(f"{theirs}{name}.weight" for name in ("b", "a"))
    return (
        before,
        Weight(
            ours + "in_proj_qkvz.weight", qkvz, Layout.QKV, (keys, keys, values, values), is_fused=True, groups=groups
        ),
        Weight(ours + "in_proj_ba.weight", ba, Layout.QKV, (heads, heads), groups=groups),
        *others,
    )


def linear(
    ours: str, theirs: tuple[str, ...], layout: Layout, shapes: tuple[tuple[int, ...], ...], has_bias: bool, **more: Any
) -> tuple[Weight, ...]:
    """The weight of a linear layer, and its bias if it has one; a row-parallel one's is on every rank."""
    bias = Layout.REPLICATED if layout is Layout.ROW else layout
    weight = Weight(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), layout, shapes, **more)
    sizes = tuple(shape[:1] for shape in shapes)
    return (
        weight,
        *([Weight(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias, sizes, **more)] if has_bias else []),
    )


def gated_mlp(
    shape: ModelShape,
    ours: str = "decoder.layers.{layer}.mlp.",
    theirs: str = "model.layers.{layer}.mlp.",
    *,
    ffn_hidden_size: int | None = None,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Weight, ...]:
    """The SwiGLU matrices under a prefix on each side, and their biases; with two `names` gate and up are fused."""
    ffn, hidden, bias = ffn_hidden_size or shape.ffn_hidden_size, shape.hidden_size, shape.features.mlp_bias
    *first, down = (f"{theirs}{name}" for name in names)
    sizes = ((ffn, hidden), (ffn, hidden))
    return (
        *linear(ours + "linear_fc1", tuple(first), Layout.GATED, sizes, bias, is_fused=len(first) == 1),
        *linear(ours + "linear_fc2", (down,), Layout.ROW, ((hidden, ffn),), bias),
    )


def dense_weights(
    shape: ModelShape,
    *,
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    after: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm"),
    fused_qkv: str = "",
    mlp: Rows = gated_mlp,
    net: Rows = delta_net,
) -> tuple[Weight, ...]:
    """The complete table of a dense decoder, with the names of the norms around attention and MLP that it has."""
    features, ours, layer = shape.features, "decoder.layers.{layer}.mlp.", "model.layers.{layer}."
    scalar = Weight("decoder.layers.{layer}.layer_scalar", (layer + "layer_scalar",), Layout.REPLICATED, ((1,),))

    def mlp_norm(is_there: bool, megatron: str, name: str) -> tuple[Weight, ...]:
        return (norm(ours + megatron, layer + name, shape.hidden_size),) if is_there else ()

    return (
        embedding(shape),
        *_attentions(shape, before[0], after[0], fused_qkv, net=net),
        *mlp_norm(features.norm_before, "linear_fc1.layer_norm_weight", before[1]),
        *mlp(shape),
        *mlp_norm(features.norm_after, "linear_fc2.post_layernorm.weight", after[1]),
        *([scalar] if features.layer_scalar else []),
        *head(shape),
    )


def moe_weights(
    shape: ModelShape,
    *,
    block: str = "model.layers.{layer}.mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    experts: tuple[Weight, ...] | None = None,
    more: tuple[Weight, ...] = (),
    net: Rows = delta_net,
) -> tuple[Weight, ...]:
    """The complete table of a decoder with experts in every layer, or all but `dense_layers`.

    `block`, `names` and `router` are Hugging Face's; `experts` are their rows where all share a tensor, and
    `more` others of layers with experts.
    """
    ours, theirs, features = "decoder.layers.{layer}.", block + "experts.{expert}.", shape.features
    experts = experts or gated_mlp(
        shape, ours + "mlp.experts.experts.", theirs, ffn_hidden_size=shape.expert_ffn_hidden_size, names=names
    )
    gate, router_shape = f"{block}{router}.", (shape.num_experts, shape.hidden_size)
    bias = Weight(
        ours + "mlp.router.expert_bias",
        (gate + "e_score_correction_bias",),
        Layout.REPLICATED,
        (router_shape[:1],),
        keep_dtype=True,
    )
    sparse = (
        norm(ours + "pre_mlp_layernorm.weight", _MLP_NORM, shape.hidden_size),
        Weight(ours + "mlp.router.weight", (gate + "weight",), Layout.REPLICATED, (router_shape,)),
        *([bias] if features.routing and features.routing.expert_bias else []),
        *experts,  # stacked in megatron-core's distributed checkpoints
        *more,
    )
    dense = (
        norm(ours + "mlp.linear_fc1.layer_norm_weight", _MLP_NORM, shape.hidden_size),
        *gated_mlp(shape, theirs=block),
    )
    return (
        embedding(shape),
        *_attentions(shape, net=net),
        *(_in_layers(dense, features.dense_layers) if features.dense_layers else ()),
        *(_in_layers(sparse, shape.expert_layers) if features.dense_layers else sparse),
        *head(shape),
    )


def _attentions(
    shape: ModelShape, before: str = "input_layernorm", after: str = "", fused: str = "", *, net: Rows
) -> tuple[Weight, ...]:
    """Attention of all layers, or what is in its place; the names are those of `attention`."""
    features = shape.features
    if features.latent_attention:
        return latent_attention(shape)
    rows = attention(shape, before, after, fused)
    if nets := features.delta_net_layers:
        full = tuple(layer for layer in range(shape.num_layers) if layer not in nets)
        return *_in_layers(rows, full), *_in_layers(net(shape), nets)
    if other := features.global_attention:
        wide = replace(shape, head_dim=other.head_dim, num_query_groups=other.num_query_groups)
        others = attention(wide, before, after, fused, parts="qk" if other.keys_are_values else "qkv")
        return *_in_layers(rows, features.local_layers), *_in_layers(others, shape.global_layers)
    return rows


def _in_layers(rows: Iterable[Weight], layers: tuple[int, ...]) -> tuple[Weight, ...]:
    return tuple(replace(row, layers=layers) for row in rows)


def stacked_experts(
    shape: ModelShape, theirs: str, names: tuple[str, str] = ("gate_up_proj", "down_proj"), **how: Any
) -> tuple[Weight, ...]:
    """Experts of which Hugging Face has one tensor for all, with their biases; `how` it has them is in `Weight`."""
    hidden, ffn, rows = shape.hidden_size, shape.expert_ffn_hidden_size, list[Weight]()
    sizes = (((ffn, hidden), (ffn, hidden)), ((hidden, ffn),))
    for name, hf, layout, shapes in zip(("fc1", "fc2"), names, (Layout.GATED, Layout.ROW), sizes, strict=True):
        row = f"decoder.layers.{{layer}}.mlp.experts.experts.linear_{name}."
        rows.append(Weight(row + "weight", (theirs + hf,), layout, shapes, num_stacked=shape.num_experts, **how))
        if shape.features.mlp_bias:
            kind, outs = Layout.REPLICATED if layout is Layout.ROW else layout, tuple(size[:1] for size in shapes)
            bias = Weight(row + "bias", (f"{theirs}{hf}_bias",), kind, outs, num_stacked=shape.num_experts, **how)
            rows.append(bias)
    return tuple(rows)


def stacked_moe_weights(shape: ModelShape) -> tuple[Weight, ...]:
    """The complete table of a decoder with experts in every layer, of which Hugging Face has one tensor for all.

    With biases of experts and router, and attention sinks (gpt-oss).
    """
    ours, theirs, router = "decoder.layers.{layer}.", "model.layers.{layer}.", (shape.num_experts, shape.hidden_size)
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    sinks = ours + "self_attention.core_attention.softmax_offset"

    return (
        embedding(shape),
        *attention(shape),
        Weight(sinks, (theirs + "self_attn.sinks",), Layout.COLUMN, ((heads,),)),
        norm(ours + "pre_mlp_layernorm.weight", _MLP_NORM, hidden),
        *linear(ours + "mlp.router", (theirs + "mlp.router",), Layout.REPLICATED, (router,), has_bias=True),
        *stacked_experts(shape, theirs + "mlp.experts.", is_transposed=True, is_alternating=True),
        *head(shape),
    )
