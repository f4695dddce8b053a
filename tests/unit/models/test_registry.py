"""config.json to model shape: what is read, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest

import pretrainkit.models
from pretrainkit.config.layer_features import LLAMA
from pretrainkit.config.schema import RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.registry import FAMILIES, read_shape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 263,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder with CONFIG, changed."""

    def write(**changes: Any) -> Path:
        config = {**CONFIG, **changes}
        if architectures := changes.get("architectures"):
            known = {name: family.name for family in FAMILIES for name in family.architectures}
            config["model_type"] = changes.get("model_type", known.get(architectures[0]))
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
        return tmp_path

    return write


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_shape_of_every_family_is_read(make_model: Callable[..., Path], name: str) -> None:
    config = json.loads((make_model(name) / "config.json").read_text())
    shape = read_shape(make_model(name))
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (4, 64, 263)
    assert (shape.num_attention_heads, shape.num_query_groups) == (8, 4)
    assert shape.head_dim == (config.get("head_dim") or 8)
    assert shape.tie_word_embeddings == name.endswith("tied")
    assert shape.qkv_bias == name.startswith(("qwen2", "seed"))
    assert shape.qk_norm == name.startswith("qwen3")
    assert shape.num_experts == (8 if name in hf_models.MIXTURES else 0)
    assert shape.rope_theta == (config.get("rope_parameters") or config)["rope_theta"]  # transformers 5 or 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
    ids=["rope_type", "type", "rope_parameters"],
)
def test_llama3_rope_is_read_in_every_spelling(folder: Callable[..., Path], rope: dict[str, Any]) -> None:
    shape = read_shape(folder(**rope))
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, ["FooForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["missing", "LlamaForCausalLM"]),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, ["not supported: it has an indexer"]),
        ({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": True}, ["attention_bias", "false"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, ["proportional", "llama3"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "lacks original_max_position_embeddings"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "mystery": 1}}, ["mystery"]),
        ({"residual_multiplier": 0.22}, ["residual_multiplier", "--ignore-config-fields"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers", "null", "32"]),
        ({"architectures": ["MixtralForCausalLM"], "intermediate_size": None}, ["intermediate_size", "null"]),
        ({"num_key_value_heads": 3}, ["8", "3"]),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, ["use_sliding_window"]),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 32,
          "mlp_only_layers": [0]}, ["mlp_only_layers"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    folder: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        read_shape(folder(**changes))
    assert all(word in str(caught.value) for word in words), caught.value


def test_unknown_fields_can_be_declared_harmless(folder: Callable[..., Path]) -> None:
    assert read_shape(folder(made_by="lab"), ignore_fields=["made_by"]) == read_shape(folder())


def test_sliding_window_that_covers_the_context_is_no_window(folder: Callable[..., Path]) -> None:
    config = {"architectures": ["MistralForCausalLM"], "rope_theta": 10000.0}
    assert read_shape(folder(**config, sliding_window=512)).features == LLAMA
    assert read_shape(folder(**config, sliding_window=511)).features.sliding_window == 511


@pytest.mark.parametrize("text", ["", "[]", "{"], ids=["empty", "list", "torn"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RequestError):
        read_shape(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no config\.json"):
        read_shape(tmp_path)


def test_reading_a_shape_imports_neither_torch_nor_transformers(folder: Callable[..., Path]) -> None:
    code = (
        "import sys; from pretrainkit.models.registry import read_shape; read_shape(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder())], check=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_one_short_file(family: Any) -> None:
    path = Path(pretrainkit.models.__file__).with_name(f"{family.name}.py")
    assert len(path.read_text().splitlines()) < 100
