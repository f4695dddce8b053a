"""Qwen2 and Qwen2.5: Llama's computation with biases on query, key and value."""

from __future__ import annotations

from functools import partial

from pretrainkit.models.decoder import QWEN_WINDOW_DEFAULTS, QWEN_WINDOW_FIELDS, read_qwen
from pretrainkit.models.family import Family, NemoClasses
from pretrainkit.models.weight_rows import dense_weights

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    fields=QWEN_WINDOW_FIELDS,
    defaults={
        **QWEN_WINDOW_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    has_layer_types=True,
    shape=partial(read_qwen, "qwen2", qkv_bias=True),
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen2:Qwen2Model",
        config="nemo.collections.llm.gpt.model.qwen2:Qwen2Config",
    ),
)
