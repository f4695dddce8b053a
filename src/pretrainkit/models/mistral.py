"""Mistral: Llama's computation with an independent head dimension; sliding windows are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import check_sliding_window, dense_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family, NemoClasses, names


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Mistral config.json describes."""
    check_sliding_window(config)
    return read_decoder("mistral", config)


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    fields=ConfigFields(read=names("sliding_window")),
    shape=read_shape,
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.mistral:MistralModel",
        config="nemo.collections.llm.gpt.model.mistral:MistralConfig7B",
        fields={"window_size": None, "cp_comm_type": None},  # its default is Mistral 7B v0.1's sliding window
    ),
)
