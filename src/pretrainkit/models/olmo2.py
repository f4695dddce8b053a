"""OLMo 2: norms after the blocks and none before, and norms of queries and keys over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights

OLMO_FEATURES: Mapping[str, Any] = {"norm_before": False, "norm_after": True, "qk_norm_over_heads": True}
OLMO_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-05,
    "vocab_size": 50304,
}

FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    fields=ConfigFields(read=names("attention_bias")),
    defaults=OLMO_DEFAULTS,
    shape=partial(read_decoder, "olmo2", features=OLMO_FEATURES, qk_norm=True),
    weights=dense_weights,
)
