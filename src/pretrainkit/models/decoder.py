"""What decoder-only families share: fields of config.json, reading them, and rows of the weight table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape, RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.family import ConfigFields, Layout, Weight, names

_READ = names("""
    head_dim hidden_size initializer_range intermediate_size layer_types max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
    vocab_size
""")
_METADATA = names("""
    architectures auto_map dtype is_llama_config model_type torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version
""")
_GENERATION = names("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature tokenizer_class top_k top_p typical_p
""")
_OTHER_TASKS = names("""
    cross_attention_hidden_size finetuning_task id2label label2id output_attentions output_hidden_states problem_type
    return_dict task_specific_params tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16 use_cache
""")
_DROPOUT = names("attention_dropout hidden_dropout embd_pdrop resid_pdrop")

DECODER_FIELDS = ConfigFields(
    read=_READ,
    fixed={
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "pretraining_tp": (1, None),
        "is_decoder": (None, True, False),
        "add_cross_attention": (None, False),
        "chunk_size_feed_forward": (0,),
        "pruned_heads": ({},),
        "is_encoder_decoder": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1.0, 1, None),
    },
    ignored=_METADATA | _GENERATION | _OTHER_TASKS | _DROPOUT,
)
"""Fields of every family: `read_decoder` reads them, or they don't affect a forward pass without dropout.

Private fields (`_name_or_path`) and ids of special tokens (`eos_token_id`) are ignored by their form.
"""

QWEN_FIELDS = ConfigFields(
    fixed={"use_sliding_window": (False, None)},
    ignored=names("sliding_window max_window_layers use_mrope"),  # no effect without use_sliding_window
)
"""Fields of Qwen2 and Qwen3 in addition to those of every decoder."""

QWEN_MOE_FIELDS = QWEN_FIELDS | ConfigFields(
    read=names("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef"),
    fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},  # experts in every layer
    ignored=names("output_router_logits"),
)
"""Fields of Qwen's mixtures of experts in addition to those of every decoder."""

DECODER_DEFAULTS: Mapping[str, Any] = {
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Defaults of fields that the config classes of the families share, if not given otherwise.

Those of the sizes differ. A test compares every family's with the config classes of both generations of transformers.
"""

QWEN_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Defaults of Qwen2 and Qwen3."""

QWEN_MOE_DEFAULTS: Mapping[str, Any] = {
    **QWEN_DEFAULTS,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "num_hidden_layers": 24,
    "router_aux_loss_coef": 0.001,
}
"""Defaults of Qwen's mixtures of experts."""

_MLP_NORM = "model.layers.{layer}.post_attention_layernorm"


def read_qwen_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The expert fields of a ModelShape, as Qwen's configs name them."""
    return {
        "num_experts": config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn_hidden_size": config["moe_intermediate_size"],
        "norm_topk_prob": config["norm_topk_prob"],
        "router_aux_loss_coef": config["router_aux_loss_coef"],
    }


def read_decoder(
    family: str, config: Mapping[str, Any], *, has_sliding_window: bool = False, **extra: Any
) -> ModelShape:
    """A ModelShape from the fields that all decoder families share; `extra` adds fields.

    `config` is what `hf_config.read_fields` gives. With `has_sliding_window`, a window that is shorter than the context
    is refused.
    """
    window, context = config.get("sliding_window"), config["max_position_embeddings"]
    if has_sliding_window and window is not None and window < context:
        raise RequestError(
            f"sliding_window = {window} is not supported",
            where="config.json",
            needed="null, or at least max_position_embeddings; a config.json without this field has the default of its "
            "class in transformers (4096 for Mistral)",
            action="if the model has no window, write null; if you train at sequences up to the window, set "
            "max_position_embeddings to it",
        )
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    if heads % groups:
        raise RequestError(
            f"{heads} attention heads don't divide into {groups} key/value heads",
            where="config.json",
            needed="num_attention_heads a multiple of num_key_value_heads",
        )
    scaling = {name: value for name, value in (config["rope_scaling"] or {}).items() if name != "rope_type"}
    original = scaling.pop("original_max_position_embeddings", 0)
    return ModelShape(
        family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=context,
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        tie_word_embeddings=config["tie_word_embeddings"],
        rope_scaling=RopeScaling(
            **{name: float(value) for name, value in scaling.items()}, original_max_position_embeddings=original
        )
        if scaling
        else None,
        initializer_range=config["initializer_range"],
        **extra,
    )


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


def attention(shape: ModelShape) -> tuple[Weight, ...]:
    """Grouped-query attention with its input norm; QKV biases and query/key norms if the shape has them."""
    ours, theirs = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    hidden, sizes = shape.hidden_size, (query, key_value, key_value)

    def qkv(kind: str, shapes: tuple[tuple[int, ...], ...]) -> Weight:
        return Weight(
            f"{ours}linear_qkv.{kind}", tuple(f"{theirs}{name}_proj.{kind}" for name in "qkv"), Layout.QKV, shapes
        )

    return (
        norm(ours + "linear_qkv.layer_norm_weight", "model.layers.{layer}.input_layernorm", hidden),
        qkv("weight", tuple((size, hidden) for size in sizes)),
        *([qkv("bias", tuple((size,) for size in sizes))] if shape.qkv_bias else []),
        *(
            norm(f"{ours}{name}_layernorm.weight", f"{theirs}{name}_norm", shape.head_dim)
            for name in ("qk" if shape.qk_norm else "")
        ),
        Weight(ours + "linear_proj.weight", (theirs + "o_proj.weight",), Layout.ROW, ((hidden, query),)),
    )


def gated_mlp(
    shape: ModelShape,
    ours: str = "decoder.layers.{layer}.mlp.",
    theirs: str = "model.layers.{layer}.mlp.",
    *,
    ffn_hidden_size: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Weight, ...]:
    """The SwiGLU matrices under a prefix on each side."""
    ffn, hidden = ffn_hidden_size or shape.ffn_hidden_size, shape.hidden_size
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    return (
        Weight(ours + "linear_fc1.weight", (gate, up), Layout.GATED, ((ffn, hidden), (ffn, hidden))),
        Weight(ours + "linear_fc2.weight", (down,), Layout.ROW, ((hidden, ffn),)),
    )


def dense_weights(shape: ModelShape) -> tuple[Weight, ...]:
    """The complete table of a dense decoder."""
    mlp_norm = norm("decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight", _MLP_NORM, shape.hidden_size)
    return (embedding(shape), *attention(shape), mlp_norm, *gated_mlp(shape), *head(shape))


def moe_weights(
    shape: ModelShape,
    *,
    block: str = "model.layers.{layer}.mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    more: tuple[Weight, ...] = (),
) -> tuple[Weight, ...]:
    """The complete table of a decoder with experts in every layer; `block` and `names` are Hugging Face's."""
    ours, theirs = "decoder.layers.{layer}.", block + "experts.{expert}."
    experts = gated_mlp(
        shape, ours + "mlp.experts.experts.", theirs, ffn_hidden_size=shape.expert_ffn_hidden_size, names=names
    )
    router_shape = (shape.num_experts, shape.hidden_size)
    return (
        embedding(shape),
        *attention(shape),
        norm(ours + "pre_mlp_layernorm.weight", _MLP_NORM, shape.hidden_size),
        Weight(ours + "mlp.router.weight", (block + "gate.weight",), Layout.REPLICATED, (router_shape,)),
        *experts,  # stacked in megatron-core's distributed checkpoints
        *more,
        *head(shape),
    )
