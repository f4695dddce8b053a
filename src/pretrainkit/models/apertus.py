"""Apertus: an MLP without a gate whose activation, xIELU, has two weights; norms of each query and key head."""

from __future__ import annotations

from functools import partial

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, Layout, Weight, names
from pretrainkit.models.weight_rows import dense_weights, linear


def mlp(shape: ModelShape) -> tuple[Weight, ...]:
    """The rows of an MLP; the constants beta and eps are in Hugging Face's checkpoints, too."""
    ours, theirs = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    ffn, hidden = shape.ffn_hidden_size, shape.hidden_size

    def one(name: str, is_scalar: bool) -> Weight:
        hf = (f"{theirs}act_fn.{name}",)
        return Weight(f"{ours}activation_func.{name}", hf, Layout.REPLICATED, ((1,),), is_scalar=is_scalar)

    return (
        *linear(ours + "linear_fc1", (theirs + "up_proj",), Layout.COLUMN, ((ffn, hidden),), False),
        *linear(ours + "linear_fc2", (theirs + "down_proj",), Layout.ROW, ((hidden, ffn),), False),
        *(one(name, False) for name in ("alpha_p", "alpha_n")),
        *(one(name, True) for name in ("beta", "eps")),
    )


FAMILY = Family(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    fields=ConfigFields(read=names("attention_bias"), fixed={"hidden_act": ("xielu",)}),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 12000000.0,
        "vocab_size": 131072,
    },
    shape=partial(read_decoder, "apertus", features={"activation": "xielu"}, qk_norm=True),
    weights=partial(dense_weights, before=("attention_layernorm", "feedforward_layernorm"), mlp=mlp),
)
