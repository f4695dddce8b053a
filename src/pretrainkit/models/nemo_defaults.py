"""What NeMo's config classes take for a field that a checkpoint's context leaves out.

A context holds the arguments that the class was called with. Only fields that no tensor's shape shows are here; a test
compares them with NeMo's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = (
    "layernorm_epsilon",
    "rotary_base",
    "moe_router_topk",
    "window_size",
    "scale_factor",
    "low_freq_factor",
    "high_freq_factor",
    "old_context_len",
)
_BASE: dict[str, Any] = {
    **dict.fromkeys(FIELDS),
    "layernorm_epsilon": 1e-05,
    "rotary_base": 10_000,
    "moe_router_topk": 2,
}
_LLAMA_31 = {
    **_BASE,
    "scale_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "old_context_len": 8192,
}
_QWEN = {**_BASE, "rotary_base": 1_000_000, "layernorm_epsilon": 1e-06}
_CLASSES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("LlamaConfig Llama2Config7B Llama2Config13B Llama2Config70B Llama3Config CodeLlamaConfig70B", _BASE),
    ("CodeLlamaConfig7B CodeLlamaConfig13B CodeLlamaConfig34B", {**_BASE, "rotary_base": 1_000_000}),
    ("Llama3Config8B Llama3Config70B", {**_BASE, "rotary_base": 500_000}),
    ("Llama31Config", _LLAMA_31),
    ("Llama31Config8B Llama31Config70B Llama31Config405B", {**_LLAMA_31, "rotary_base": 500_000}),
    ("Llama32Config1B Llama32Config3B", {**_LLAMA_31, "rotary_base": 500_000, "scale_factor": 32}),
    ("MistralConfig7B", {**_BASE, "window_size": [4096, 0]}),
    ("MistralNeMoConfig12B MistralNeMoConfig123B", {**_BASE, "rotary_base": 1_000_000}),
    ("MistralSmall3Config24B", {**_BASE, "rotary_base": 100_000_000}),
    ("MixtralConfig MixtralConfig8x3B MixtralConfig8x7B MixtralConfig8x22B", {**_BASE, "rotary_base": 1_000_000}),
    ("Qwen2Config Qwen2Config500M Qwen2Config1P5B Qwen2Config7B", _QWEN),
    ("Qwen25Config500M Qwen25Config1P5B Qwen25Config3B Qwen25Config7B", _QWEN),
    ("Qwen2Config72B Qwen25Config14B Qwen25Config32B Qwen25Config72B", {**_QWEN, "layernorm_epsilon": 1e-05}),
    ("Qwen3Config Qwen3Config600M Qwen3Config1P7B Qwen3Config4B Qwen3Config8B Qwen3Config14B Qwen3Config32B", _QWEN),
    ("Qwen3MoEConfig Qwen3Config30B_A3B Qwen3Config235B_A22B", {**_QWEN, "moe_router_topk": 8}),
)
NEMO_DEFAULTS: dict[str, Mapping[str, Any]] = {name: fields for names, fields in _CLASSES for name in names.split()}
"""Class name -> field -> default. Of a class that isn't here (your own), nothing is known but what a context says."""
