"""Llama 2, 3, 3.1, 3.2 and what shares their architecture (SmolLM2, Swallow, Yi)."""

from __future__ import annotations

from functools import partial

from pretrainkit.models.decoder import dense_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family, NemoClasses

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    fields=ConfigFields(fixed={"attention_bias": (False,), "mlp_bias": (False,)}),
    shape=partial(read_decoder, "llama"),
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.llama:LlamaModel",
        config="nemo.collections.llm.gpt.model.llama:LlamaConfig",
        scaled_rope_config="nemo.collections.llm.gpt.model.llama:Llama31Config",
    ),
)
