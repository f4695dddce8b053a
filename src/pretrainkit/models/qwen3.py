"""Qwen3: Llama's computation with an RMSNorm on each query and key head."""

from __future__ import annotations

from functools import partial

from pretrainkit.models.decoder import QWEN_WINDOW_DEFAULTS, QWEN_WINDOW_FIELDS, read_qwen
from pretrainkit.models.family import ConfigFields, Family, NemoClasses, names
from pretrainkit.models.weight_rows import dense_weights

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    fields=QWEN_WINDOW_FIELDS | ConfigFields(read=names("attention_bias")),
    defaults={
        **QWEN_WINDOW_DEFAULTS,
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    has_layer_types=True,
    shape=partial(read_qwen, "qwen3", qk_norm=True),
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen3:Qwen3Model",
        config="nemo.collections.llm.gpt.model.qwen3:Qwen3Config",
        context_length_field="max_position_embeddings",
    ),
)
