"""The text model in a multimodal folder: its part of config.json, and the names of its tensors.

| what | text model | multimodal model, as published and as either generation of transformers saves it |
|---|---|---|
| config.json | the object | `text_config`, which has the text model's `model_type` |
| tied embeddings | `tie_word_embeddings` | in `text_config` (transformers 4) and outside (transformers 5) |
| tensors | `model.layers.0...`, `lm_head.weight` | the same after `language_model.`, or of newer models |
| | | `model.language_model.layers.0...`, `lm_head.weight`; others are the rest |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pretrainkit.errors import RequestError

TEXT_MODELS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Multimodal architecture -> `model_type` of its text model -> architecture of that."""
_NEWER = (
    "Gemma4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Those whose text model is named within `model.`."""
_PREFIX, _MODEL, _WITHIN, _HEAD = "language_model.", "model.", "model.language_model.", "lm_head."
_TEXT, _TIED = "text_config", "tie_word_embeddings"
_OF_WHOLE = ("dtype", "torch_dtype", "quantization_config", "auto_map")
"""Fields outside that are the text model's, too."""
_Value = TypeVar("_Value")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model whose text model is known."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in TEXT_MODELS


def text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the text model: the object itself unless it is a multimodal model's.

    Raises RequestError for a text model that isn't one of its architecture's, and for contradicting fields.
    """
    if not is_multimodal(config):
        return dict(config)
    known, text = TEXT_MODELS[config["architectures"][0]], config.get(_TEXT)
    kind = str(text.get("model_type")) if isinstance(text, Mapping) else ""
    if not isinstance(text, Mapping) or kind not in known:
        raise RequestError(
            f"{_TEXT} with model_type {kind!r} in a {config['architectures'][0]}",
            where=where,
            needed=f"{_TEXT} with model_type {' or '.join(map(repr, known))}",
        )
    for name in (*_OF_WHOLE, _TIED):
        if name in text and name in config and text[name] != config[name]:
            raise RequestError(
                f"{name} {config[name]!r}, and {text[name]!r} in {_TEXT}: they contradict each other",
                where=where,
                needed="one value: which of the two is read depends on the version of transformers",
            )
    outside = {name: config[name] for name in (*_OF_WHOLE, _TIED) if name in config}
    return {**outside, **text, "architectures": [known[kind]]}


def with_text_config(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose text model has the config `text`, as `text_config` gives it."""
    if not is_multimodal(config):
        return dict(text)
    dtypes = {name: text[name] for name in ("dtype", "torch_dtype") if name in text}
    inner = {name: value for name, value in text.items() if name not in ("architectures", "quantization_config")}
    # Explicit, since transformers 5 takes true for a multimodal model that doesn't say it.
    tied = {_TIED: text[_TIED]} if _TIED in text else {}
    outside = {name: value for name, value in config.items() if name != "quantization_config"}
    return {**outside, **dtypes, **tied, _TEXT: inner}


def text_tensors(tensors: Mapping[str, _Value]) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """The tensors of the text model under its own names, and the rest of a multimodal model's under theirs.

    Those of a text model, which have no prefix, are all its own.
    """
    if any(name.startswith(_WITHIN) for name in tensors):
        names = {name: name.replace(_WITHIN, _MODEL, 1) for name in tensors if name.startswith((_WITHIN, _HEAD))}
    elif any(name.startswith(_PREFIX) for name in tensors):
        names = {name: name.removeprefix(_PREFIX) for name in tensors if name.startswith(_PREFIX)}
    else:
        return dict(tensors), {}
    text = {text: tensors[name] for name, text in names.items()}
    return text, {name: value for name, value in tensors.items() if name not in names}


def whole_name(name: str, config: Mapping[str, Any]) -> str:
    """The name of a text model's tensor in the model that `config` describes, which is that of `text_tensors`."""
    if not is_multimodal(config):
        return name
    if config["architectures"][0] not in _NEWER:
        return _PREFIX + name
    return name.replace(_MODEL, _WITHIN, 1) if name.startswith(_MODEL) else name
