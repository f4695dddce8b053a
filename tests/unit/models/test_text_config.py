"""The text model of a multimodal folder's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.schema import RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.flops import parameters
from pretrainkit.models.multimodal import text_config, text_tensors, whole_name, with_text_config
from pretrainkit.models.registry import read_shape, read_whole_config

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
"""A config.json in the short form of the published folders of Gemma 3, with the sizes of 4B."""


def test_a_config_that_relies_on_the_defaults_of_the_text_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    shape = read_shape(tmp_path)
    assert parameters(shape) == 3_880_263_168  # of Gemma3ForCausalLM in transformers
    assert (shape.family, shape.max_position_embeddings, shape.tie_word_embeddings) == ("gemma3_text", 131072, True)
    assert shape.rope_scaling == RopeScaling(8.0, kind="linear") and shape.features.sliding_window == 1024
    assert read_whole_config(tmp_path) == GEMMA_3_4B


def test_a_changed_text_model_leaves_the_rest_as_it_is() -> None:
    text = text_config(GEMMA_3_4B, "config.json")
    assert text["architectures"] == ["Gemma3ForCausalLM"] and text["torch_dtype"] == "bfloat16"
    changed = with_text_config(GEMMA_3_4B, {**text, "hidden_size": 64, "tie_word_embeddings": True})
    assert changed["text_config"]["hidden_size"] == 64 and changed["tie_word_embeddings"] is True
    assert "architectures" not in changed["text_config"]
    rest = GEMMA_3_4B.keys() - {"text_config"}
    assert {name: changed[name] for name in rest} == {name: GEMMA_3_4B[name] for name in rest}


def test_fields_that_differ_within_and_outside_are_refused() -> None:
    text = {**GEMMA_3_4B["text_config"], "torch_dtype": "float32"}
    with pytest.raises(RequestError, match="torch_dtype 'bfloat16', and 'float32' in text_config"):
        text_config({**GEMMA_3_4B, "text_config": text}, "config.json")


def test_tensors_are_divided_by_their_names() -> None:
    names = ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x", "multi_modal_y"]
    text, rest = text_tensors(dict.fromkeys(names, 0))
    assert list(text) == ["model.norm.weight", "lm_head.weight"] and list(rest) == names[2:]
    assert [whole_name(name, GEMMA_3_4B) for name in text] == names[:2]
    names = ["model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x"]
    text, rest = text_tensors(dict.fromkeys(names, 0))
    assert list(text) == ["model.norm.weight", "lm_head.weight"] and list(rest) == names[2:]
    newer = {**GEMMA_3_4B, "architectures": ["Gemma4ForConditionalGeneration"]}
    assert [whole_name(name, newer) for name in text] == names[:2]
    assert text_tensors({"model.norm.weight": 0}) == ({"model.norm.weight": 0}, {})
