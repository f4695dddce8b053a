"""Llama 2, 3, 3.1, 3.2 and what shares their architecture (SmolLM2, Swallow, Yi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import dense_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Llama config.json describes."""
    return read_decoder("llama", config)


def nemo_config(shape: ModelShape) -> tuple[str, dict[str, Any]]:
    """NeMo scales rotary frequencies in a config class of its own."""
    module, scaling = "nemo.collections.llm.gpt.model.llama", shape.rope_scaling
    if scaling is None:
        return f"{module}:LlamaConfig", {}
    return f"{module}:Llama31Config", {
        "scale_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "old_context_len": scaling.original_max_position_embeddings,
    }


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    fields=ConfigFields(fixed={"attention_bias": (False,), "mlp_bias": (False,)}),
    shape=read_shape,
    weights=dense_weights,
    nemo_model="nemo.collections.llm.gpt.model.llama:LlamaModel",
    nemo_config=nemo_config,
)
