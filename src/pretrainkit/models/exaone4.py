"""EXAONE 4: norms after the blocks; in models with windows, the layers without one have no rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import SLIDING, ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that an EXAONE 4 config.json describes."""
    types, window, pattern = (
        config.get("layer_types"),
        config["sliding_window"],
        config.get("sliding_window_pattern", 4),
    )
    layers = range(config["num_hidden_layers"])
    if types is None and window is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise RequestError(
                f"sliding_window_pattern {pattern!r}", where="config.json", needed="layer_types, by which layers differ"
            )
        types = [SLIDING if (layer + 1) % pattern else "" for layer in layers]
    windows = window_features({**config, "layer_types": types}, lambda layer: False)
    without = tuple(layer for layer in layers if types[layer] != SLIDING) if types and window is not None else ()
    features = {"norm_before": False, "norm_after": True, "nope_layers": without, **windows}
    return read_decoder("exaone4", config, features=features, qk_norm=True)


FAMILY = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    fields=ConfigFields(read=names("sliding_window sliding_window_pattern")),
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "sliding_window": 4096,
        "vocab_size": 102400,
    },
    has_layer_types=True,
    shape=read_shape,
    weights=dense_weights,
)
