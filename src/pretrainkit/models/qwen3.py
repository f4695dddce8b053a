"""Qwen3: Llama's computation with an RMSNorm on each query and key head."""

from __future__ import annotations

from functools import partial

from pretrainkit.models.decoder import QWEN_FIELDS, dense_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family, NemoClasses

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    fields=QWEN_FIELDS | ConfigFields(fixed={"attention_bias": (False,)}),
    shape=partial(read_decoder, "qwen3", default_head_dim=128, qk_norm=True),
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen3:Qwen3Model",
        config="nemo.collections.llm.gpt.model.qwen3:Qwen3Config",
        context_length_field="max_position_embeddings",
    ),
)
