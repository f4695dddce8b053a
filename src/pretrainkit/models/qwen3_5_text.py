"""Qwen3.5 (dense, text): Qwen3-Next without experts, and with separate projections of its gated delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import FULL, LINEAR, ConfigFields, Family, names
from pretrainkit.models.qwen3_next import DELTA_NET_DEFAULTS, DELTA_NET_FIELDS, delta_net_features
from pretrainkit.models.weight_rows import dense_weights, separate_delta_net

QWEN3_5_FIELDS = DELTA_NET_FIELDS | ConfigFields(
    fixed={"attn_output_gate": (True,)},
    # The precision of an inference cache, and parts that predict further tokens.
    ignored=names("mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"),
)
QWEN3_5_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    **DELTA_NET_DEFAULTS,
    "max_position_embeddings": 32768,
    "vocab_size": 248320,
}
ROPE_SETTINGS: Mapping[str, Any] = {"mrope_interleaved": True, "mrope_section": []}
"""Of the positions of images, which those of text are all the same."""


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen3.5 config.json describes."""
    return read_decoder("qwen3_5_text", config, features=delta_net_features(config), qk_norm=True)


FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    fields=QWEN3_5_FIELDS,
    defaults={
        **QWEN3_5_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    layer_types=(FULL, LINEAR),
    rope_types=("default",),
    rope_settings=ROPE_SETTINGS,
    shape=read_shape,
    weights=partial(dense_weights, net=separate_delta_net),
)
