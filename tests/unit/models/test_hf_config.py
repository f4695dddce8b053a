"""config.json as either generation of transformers writes it: one meaning, or a refusal by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_transformers
import pytest

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.config.schema import RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_FIELDS
from pretrainkit.models.family import Family
from pretrainkit.models.hf_config import absent_fields, in_both_spellings, position_boundaries, read_fields
from pretrainkit.models.registry import FAMILIES, family_named, read_shape

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {"rope_type": "llama3", **LLAMA3}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ONE_BASE = [
    family
    for family in FAMILIES
    if not family.local_rope and family.defaults.get("rope_scaling") is None and family.name != "deepseek_v2"
]
"""Families of which all layers have one rotary base, by default without scaling; DeepSeek-V2's lack a field."""
GIVEN = Path(__file__).parents[2] / "data" / "generation5"


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json with the architecture alone, and what is given."""
    return {"architectures": [*family_named(family).architectures], "model_type": family, **changes}


NEEDED: dict[str, dict[str, Any]] = {"granitemoehybrid": {"layer_types": ["attention"] * 32, "num_local_experts": 0}}
"""Settings without which the defaults of a family's class in transformers are of a model that is refused."""


@pytest.fixture
def shape_of(tmp_path: Path) -> Callable[..., Any]:
    def read(family: str, **changes: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config_of(family, **NEEDED.get(family, {}), **changes)))
        return read_shape(tmp_path)

    return read


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": DEFAULT},
        {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0}},
        {"rope_scaling": {**DEFAULT, "type": "default"}},
        {"rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": DEFAULT},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=["4", "4-null", "4-dict", "5", "5-all", "5-old-name", "both", "5-base-outside"],
)
@pytest.mark.parametrize("family", ONE_BASE, ids=lambda family: family.name)
def test_the_rotary_base_is_the_same_in_every_spelling(
    family: Family, rope: dict[str, Any], shape_of: Callable[..., Any]
) -> None:
    shape = shape_of(family.name, **rope)
    assert (shape.rope_theta, shape.rope_scaling) == (500000.0, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": SCALED},
        {"rope_parameters": {**SCALED, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": SCALED, "rope_parameters": {**SCALED, "rope_theta": 500000.0}},
    ],
    ids=["4", "5", "both"],
)
def test_llama3_scaling_is_the_same_in_every_spelling(rope: dict[str, Any], shape_of: Callable[..., Any]) -> None:
    shape = shape_of("llama", **rope)
    assert (shape.rope_theta, shape.rope_scaling) == (500000.0, RopeScaling(8.0, 1.0, 4.0, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
            }
        },
    ],
    ids=["4", "5"],
)
def test_layers_with_a_window_have_a_rotary_base_in_every_spelling(
    changes: dict[str, Any], shape_of: Callable[..., Any]
) -> None:
    shape = shape_of("gemma3_text", **changes)
    assert (shape.rope_theta, shape.features.local_rope_theta) == (5000.0, 100.0)
    assert shape.rope_scaling.kind == "linear" and shape.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    "changes", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}]
)
def test_the_rotated_part_of_a_head_is_the_same_in_both_spellings(
    changes: dict[str, Any], shape_of: Callable[..., Any]
) -> None:
    assert shape_of("glm4", **changes).features.rotary_fraction == 0.25


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
    ],
)
def test_the_factor_of_yarn_is_that_of_transformers(
    settings: dict[str, float], factor: float, shape_of: Callable[..., Any]
) -> None:
    shape = shape_of("qwen3", rope_scaling={**YARN, **settings}, max_position_embeddings=128)
    assert (shape.rope_scaling.kind, shape.rope_scaling.attention_factor) == ("yarn", pytest.approx(factor))


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("mistral", {}, (0, 1, 2, 3)),
        ("mixtral", {"sliding_window": 4096}, (0, 1, 2, 3)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}, (3,)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4096,
                   "layer_types": ["full_attention", "sliding_attention"] * 2}, (1, 3)),
        ("olmo3", {"rope_theta": 5e5}, (0, 1, 2)),
        ("gemma3_text", {"sliding_window_pattern": 2}, (0, 2)),
        ("exaone4", {"sliding_window_pattern": 2}, (0, 2)),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_layers_that_have_one(
    family: str, changes: dict[str, Any], layers: tuple[int, ...], shape_of: Callable[..., Any]
) -> None:
    settings = {"num_hidden_layers": 4, "max_position_embeddings": 8192, **changes}
    features = shape_of(family, **settings).features
    assert (features.sliding_window, features.local_layers) == (4096, layers)
    covering = shape_of(family, **{**settings, "max_position_embeddings": 4096}).features
    assert covering.sliding_window == 0
    assert LayerFeatures.from_json(features.to_json()) == features


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"rope_theta": 10000.0, "rope_parameters": DEFAULT},
         ["rope_theta 10000.0", "rope_parameters.rope_theta 500000.0", "contradict"]),
        ("llama", {"rope_scaling": SCALED, "rope_parameters": DEFAULT}, ["rope_scaling", "rope_parameters", "llama3"]),
        ("llama", {"rope_scaling": None, "rope_parameters": {**SCALED, "rope_theta": 1e4}}, ["rope_scaling None"]),
        ("llama", {"rope_scaling": {**SCALED, "type": "default"}}, ["rope_type 'llama3' and type 'default'"]),
        ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, ["dtype 'float32'", "torch_dtype 'bfloat16'"]),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, ["num_local_experts 4", "num_experts 8"]),
        ("qwen2", {"model_type": "llama"}, ["Qwen2ForCausalLM", "model_type 'llama'", "'qwen2'"]),
        ("llama", {"rope_theta": None}, ["rope_theta: null", "10000.0"]),
        ("qwen3", {"head_dim": None}, ["head_dim: null", "128"]),
        ("qwen3_moe", {"num_local_experts": None}, ["num_experts: null", "128"]),
        ("llama", {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}},
         ["full_attention, sliding_attention", "one set"]),
        ("llama", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ("llama", {"rope_parameters": {**DEFAULT, "rope_type": "longrope", "factor": 2.0}}, ["'longrope'", "'yarn'"]),
        ("llama", {"rope_parameters": [1]}, ["[1]", "JSON object"]),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("qwen3", {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ("llama", {"auto_map": {"AutoModel": "code.Model"}}, ["auto_map", "LlamaForCausalLM"]),
        ("llama", {"dtype": "torch.float33"}, ["dtype 'torch.float33'", "float32"]),
        ("llama", {"rope_parameters": {**DEFAULT, "rope_theta": True}}, ["rope_theta True", "a number"]),
        ("llama", {"rope_scaling": {**SCALED, "factor": "8"}}, ["factor '8'", "a number"]),
        ("qwen3_moe", {"num_local_experts": 8.0}, ["num_local_experts 8.0", "whole number"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_contradictions_and_unsupported_settings_are_refused_by_name(
    family: str, changes: dict[str, Any], words: list[str], shape_of: Callable[..., Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        shape_of(family, **changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_several_contradictions_are_named_at_once(shape_of: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match=r"(?s)2 problems.*torch_dtype.*rope_theta"):
        shape_of("llama", dtype="float32", torch_dtype="float16", rope_theta=1e4, rope_parameters=DEFAULT)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_both_spellings_keep_the_meaning_and_add_nothing_twice(family: Family) -> None:
    known = {"llama3": SCALED, "yarn": YARN, "proportional": {"rope_type": "proportional"}}
    scaled = {kind: settings for kind, settings in known.items() if kind in family.rope_types}
    scaling = {**next(iter(scaled.values()), {}), **family.rope_settings}
    part = {name: family.defaults[name] for name in ("partial_rotary_factor",) if name in family.defaults}
    for rope in (
        {"rope_parameters": {"rope_type": "default", **scaling, **part, "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_scaling": scaling or None},
        {},
    ):
        if family.local_rope and "rope_parameters" in rope:
            local = {"rope_type": "default", "rope_theta": 5.0}
            rope = {"rope_parameters": {"full_attention": rope["rope_parameters"], "sliding_attention": local}}
        stated = rope or ({"rope_theta": 7.0} if family.local_rope == "rope_theta" else {})
        context = {"max_position_embeddings": 128} if rope else {}
        config = config_of(family.name, num_key_value_heads=None, **context, **stated)
        both = in_both_spellings(config, family)
        assert read_fields(both, family, "") == read_fields(config, family, "")
        assert in_both_spellings(both, family) == both
        parameters = both["rope_parameters"]
        assert both["rope_theta"] == parameters.get("full_attention", parameters)["rope_theta"]
        assert {**config, "num_key_value_heads": 0}.items() <= {**both, "num_key_value_heads": 0}.items()


def test_absent_fields_are_named_with_their_default() -> None:
    config = config_of("mixtral", rope_parameters=DEFAULT, num_local_experts=4)
    absent = absent_fields(config, family_named("mixtral"))
    assert absent["rms_norm_eps"] == 1e-05 and absent["num_experts_per_tok"] == 2
    assert not {"rope_theta", "num_local_experts", "tie_word_embeddings", "head_dim"} & absent.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_default_is_of_the_type_that_its_field_must_have(family: Family) -> None:
    """So types are checked by what the config classes of transformers have, which the test after this one compares."""
    read_fields(config_of(family.name, **{k: v for k, v in family.defaults.items() if v is not None}), family, "")
    for name, default in family.defaults.items():
        for wrong in ("1", {"a": 1}, "true" if isinstance(default, bool) else True):
            if name != "rope_scaling" and type(wrong) is not type(default):
                with pytest.raises(RequestError, match=f"{name} "):
                    read_fields(config_of(family.name, **{name: wrong}), family, "")


def test_boundaries_of_positions_are_those_within_the_context() -> None:
    family = family_named("llama")
    scaled = config_of("llama", rope_scaling=SCALED, rope_theta=1e4)
    assert position_boundaries(read_fields(scaled, family, "")) == {"original_max_position_embeddings": 64}
    assert position_boundaries(read_fields({**scaled, "max_position_embeddings": 64}, family, "")) == {}
    window = config_of("qwen2", sliding_window=100, max_position_embeddings=128)
    assert position_boundaries(read_fields(window, family_named("qwen2"), "")) == {"sliding_window": 100}


@pytest.mark.parametrize("generation", [4, 5])
def test_an_absent_field_means_the_default_of_the_class_in_transformers(generation: int) -> None:
    families = [family for family in FAMILIES if generation == 5 or family.name not in other_transformers.ONLY_IN_5]
    classes = other_transformers.call(generation, "class_defaults", [family.name for family in families])
    for family in families:
        theirs = classes[family.name]
        stated = config_of(family.name, **{**theirs, "architectures": [*family.architectures]})
        base = {"rope_theta": 5e5} if family.local_rope == "rope_theta" else {}  # each generation has its own default
        stated = {name: value for name, value in stated.items() if not base or "rope" not in name} | base
        if family.name == "gpt_oss":  # so is its coefficient of a loss of training, which published models state
            stated["router_aux_loss_coef"] = family.defaults["router_aux_loss_coef"]
        if family.name == "deepseek_v2":  # and its number of rows, which the embedding shows
            stated["vocab_size"] = family.defaults["vocab_size"]
        absent = read_fields({"architectures": stated["architectures"], **base}, family, "")
        assert absent == {name: value for name, value in read_fields(stated, family, "").items() if name in absent}
        fields = DECODER_FIELDS | family.fields
        fixed = {name: values for name, values in fields.fixed.items() if name not in fields.read}
        assert {name: theirs[name] for name in fixed if name in theirs and theirs[name] not in fixed[name]} == {}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_field_that_is_read_has_a_default(family: Family) -> None:
    read = (DECODER_FIELDS | family.fields).read - {"layer_types", "rope_parameters"}
    # Of any type or length, which the family's file checks.
    lists = {"moe_layers", "no_rope_layers", "per_layer_config", "quantization_config", "sliding_window_pattern"}
    assert read - family.defaults.keys() - lists == set()


@pytest.mark.parametrize("folder", sorted(GIVEN.iterdir()), ids=lambda folder: folder.name)
def test_folders_of_transformers_5_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    shape = read_shape(folder)
    assert shape.rope_theta == config["rope_parameters"]["rope_theta"]
    assert shape.num_experts == config.get("num_local_experts", 0)
