"""SmolLM3: Llama's computation, with layers without rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import BIAS_FIELDS, DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a SmolLM3 config.json describes; `no_rope_layers` has 0 for layers without rotary embeddings."""
    layers, interval = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    switches = config.get("no_rope_layers")
    if switches is None:
        switches = [int((layer + 1) % interval != 0) for layer in layers]
    if not isinstance(switches, list) or len(switches) != len(layers) or not {*switches} <= {0, 1}:
        raise RequestError(
            f"no_rope_layers {switches!r}", where="config.json", needed=f"0 or 1 for each of the {len(layers)} layers"
        )
    without = tuple(layer for layer in layers if not switches[layer])
    return read_decoder("smollm3", config, features={"nope_layers": without})


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    fields=BIAS_FIELDS
    | ConfigFields(
        read=names("no_rope_layers no_rope_layer_interval"),
        fixed={"use_sliding_window": (False, None)},
        ignored=names("sliding_window max_window_layers"),  # no effect without use_sliding_window
    ),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    shape=read_shape,
    weights=dense_weights,
)
