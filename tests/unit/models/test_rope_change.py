"""--rope_scaling and --rope_theta: the config.json of the model that is trained with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from changed_config import changed

from pretrainkit.config.schema import ModelShape, RopeScaling, RunConfig
from pretrainkit.errors import RequestError
from pretrainkit.models.hf_config import misread_by_4
from pretrainkit.models.registry import family_named, read_config, read_shape
from pretrainkit.models.rope_change import trained_config, trained_folder

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "vocab_size": 263,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, family: str, **fields: Any) -> None:
    base = {} if family == "gemma3_text" or "rope_parameters" in fields else {"rope_theta": 10000.0}
    config = {"architectures": [*family_named(family).architectures], **SIZES, **base, **fields}
    (folder / "config.json").write_text(json.dumps(config))


def request(scaling: str | None = None, theta: float | None = None, length: int = 1024) -> RunConfig:
    return changed(RunConfig(rope_scaling=scaling, rope_theta=theta), data__sequence_length=length)


def trained_shape(folder: Path, config: RunConfig) -> ModelShape:
    """The shape of the changed config.json, which both generations read alike, and which stays when changed again."""
    with_change = trained_folder(folder, config)
    stated = read_config(with_change)
    family = family_named(read_shape(folder).family)
    assert not misread_by_4(stated, family)
    assert trained_config(with_change, config) == stated
    return read_shape(with_change)


def test_without_the_options_nothing_changes(folder: Path) -> None:
    write(folder, "llama")
    assert trained_folder(folder, request()) == folder


FACTOR_4 = RopeScaling(4.0, original_max_position_embeddings=512, kind="yarn", attention_factor=1.1386294361119891)
CASES: list[tuple[str, dict[str, Any], RunConfig, dict[str, Any]]] = [
    ("llama", {}, request("yarn factor=4"), {"rope_scaling": FACTOR_4, "max_position_embeddings": 2048}),
    ("llama", {}, request("linear factor=2"),
     {"rope_scaling": RopeScaling(2.0, kind="linear"), "max_position_embeddings": 1024}),
    ("llama", {"rope_scaling": LLAMA3}, request("llama3 factor=16 max_position_embeddings=2048"),
     {"rope_scaling": RopeScaling(16.0, 1.0, 4.0, 64), "max_position_embeddings": 2048}),
    ("llama", {"rope_scaling": LLAMA3}, request("none", 500000.0),
     {"rope_scaling": None, "rope_theta": 500000.0, "max_position_embeddings": 1024}),
    ("llama", {}, request(theta=500000.0), {"rope_theta": 500000.0, "max_position_embeddings": 1024}),
    ("llama", {}, request(theta=500000.0, length=256), {"rope_theta": 500000.0}),
    ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.1, "beta_fast": 16.0}}, request("yarn factor=16"),
     {"rope_scaling": RopeScaling(16.0, original_max_position_embeddings=128, kind="yarn", beta_fast=16.0,
                                  attention_factor=1.2772588722239782), "max_position_embeddings": 2048}),
    ("qwen3", {"rope_scaling": YARN}, request(theta=20000.0), {"rope_theta": 20000.0}),
    ("gemma3_text", {"sliding_window": 64, "rope_local_base_freq": 5000.0}, request("linear factor=4"),
     {"rope_scaling": RopeScaling(4.0, kind="linear"), "max_position_embeddings": 2048}),
    ("gemma3_text", {"sliding_window": 64}, request(theta=2000000.0),
     {"rope_theta": 2000000.0, "max_position_embeddings": 1024}),
    ("glm4", {"partial_rotary_factor": 0.25}, request(theta=20000.0, length=512), {"rope_theta": 20000.0}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, request("yarn factor=4"),
     {"rope_scaling": FACTOR_4, "max_position_embeddings": 2048}),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
              "original_max_position_embeddings": 128}, request(theta=20000.0), {"rope_theta": 20000.0}),
    ("apertus", {}, request("none"), {"rope_scaling": None, "max_position_embeddings": 8192}),
    ("ministral3", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512}},
     request("yarn factor=16"),
     {"rope_scaling": RopeScaling(16.0, original_max_position_embeddings=128, kind="yarn",
                                  attention_factor=1.2772588722239782), "max_position_embeddings": 2048}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "config", "expected"), CASES)
def test_only_the_rotary_settings_and_the_context_length_change(
    family: str, fields: dict[str, Any], config: RunConfig, expected: dict[str, Any], folder: Path
) -> None:
    write(folder, family, **fields)
    shape = read_shape(folder)
    assert trained_shape(folder, config) == dataclasses.replace(shape, **expected)


def test_settings_of_transformers_5_are_changed_too(folder: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.25}
    write(folder, "glm4", rope_parameters=parameters)
    shape = read_shape(folder)
    assert shape.features.rotary_fraction == 0.25
    wanted = dataclasses.replace(shape, rope_theta=60000.0, max_position_embeddings=1024)
    assert trained_shape(folder, request(theta=60000.0)) == wanted


@pytest.mark.parametrize(
    ("family", "scaling", "word"),
    [
        ("phi3", "yarn factor=4", "'yarn' is not supported for phi3"),
        ("gpt_oss", "llama3 factor=4", "llama3"),
        ("llama", "yarn", "lacks factor"),
        ("llama", "yarn factor=0.5 attention_factor=true", "attention_factor True"),
        ("glm4", "yarn factor=4", "'yarn' is not supported for glm4"),
    ],
)
def test_a_scaling_that_the_family_does_not_have_is_refused(family: str, scaling: str, word: str, folder: Path) -> None:
    write(folder, family, **({"rope_scaling": YARN} if family == "gpt_oss" else {}))
    with pytest.raises(RequestError) as caught:
        trained_config(folder, request(scaling))
    assert word in str(caught.value), caught.value
