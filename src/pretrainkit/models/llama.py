"""Llama 2, 3, 3.1, 3.2 and what shares their architecture (SmolLM2, Swallow, Yi)."""

from __future__ import annotations

from functools import partial

from pretrainkit.models.decoder import BIAS_FIELDS, DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import Family, NemoClasses
from pretrainkit.models.weight_rows import dense_weights

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    fields=BIAS_FIELDS,
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "vocab_size": 32000,
    },
    shape=partial(read_decoder, "llama"),
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.llama:LlamaModel",
        config="nemo.collections.llm.gpt.model.llama:LlamaConfig",
        scaled_rope_config="nemo.collections.llm.gpt.model.llama:Llama31Config",
    ),
)
