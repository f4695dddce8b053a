"""config.json of either generation of transformers: read into the spelling that families read, written in both.

| meaning | transformers 4 | transformers 5 |
|---|---|---|
| rotary base | `rope_theta` | `rope_parameters.rope_theta` |
| rotary scaling | `rope_scaling` | `rope_parameters` |
| rotated part of a head | `partial_rotary_factor` | `rope_parameters.partial_rotary_factor` |
| rotary base of layers with a window | `rope_local_base_freq` (Gemma 3) | `rope_parameters.sliding_attention` |
| layers with attention of Granite 4 | `attention` in `layer_types` | `full_attention` |
| dtype of the weights | `torch_dtype` or `dtype` | `dtype` |
| number of experts of Qwen3-MoE | `num_experts` | `num_local_experts` |

transformers 4 ignores `rope_parameters`, and each generation lets one of two contradicting fields win silently: here
they are refused. A field that is absent has the default of the family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.models.family import FULL, SLIDING, Family
from pretrainkit.models.field_types import wrong_types
from pretrainkit.models.rope_config import ORIGINAL, PARTIAL, read_rope, spelled_for_4

_DTYPES = ("dtype", "torch_dtype")
_OFF: tuple[Any, ...] = (None, False, [])
_NULLABLE = {
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "tie_word_embeddings",
}
"""Fields in which null means off (a cap, a window, tied embeddings, a latent vector of queries), or as many as heads,
whatever the default."""


def read_fields(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The fields of a config.json as the first generation spells them, with the defaults of those that are absent.

    `rope_scaling` is None, or a dict with the fields of RopeScaling and `rope_type`. Raises RequestError that names
    every value of another type than its field's, or else every contradiction and every setting of rotary embeddings and
    layers that is not supported.
    """
    RequestError.raise_all([*wrong_types(config, family, where)])
    stated = {**config, **{name: config[alias] for alias, name in family.aliases.items() if alias in config}}
    problems = [
        *_contradictions(config, family, where),
        *_nulls(stated, family, where),
        *_layer_types(config, family, where),
    ]
    with RequestError.collected(problems):
        rope = read_rope(config, family, where)
    RequestError.raise_all(problems)
    dropped = {"rope_parameters", *_DTYPES, *family.aliases}
    known = {name: value for name, value in stated.items() if name not in dropped}
    read = {**family.defaults, **known, **rope, "dtype": dtype_of(config)}
    if types := read.get("layer_types"):
        read["layer_types"] = [family.old_layer_types.get(kind, kind) for kind in types]
    heads = read["num_key_value_heads"]
    read["num_key_value_heads"] = read["num_attention_heads"] if heads is None else heads
    read["tie_word_embeddings"] = bool(read["tie_word_embeddings"])
    read["head_dim"] = read["head_dim"] or read["hidden_size"] // read["num_attention_heads"]
    return read


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The dtype of the weights that a config.json states, without `torch.`."""
    stated = next((config[name] for name in _DTYPES if config.get(name) is not None), None)
    return None if stated is None else str(stated).removeprefix("torch.")


def absent_fields(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields that a config.json leaves out although the model depends on them, with what they mean then.

    Without those whose default is derived from other fields, or switches something off.
    """
    stated = {*config, *(name for alias, name in family.aliases.items() if alias in config)}
    if any("rope_theta" in (config.get(name) or {}) for name in ("rope_parameters", "rope_scaling")):
        stated.add("rope_theta")
    if FULL in (config.get("rope_parameters") or {}):
        stated |= {"rope_theta", family.local_rope}
    if PARTIAL in (config.get("rope_parameters") or {}):
        stated.add(PARTIAL)
    return {name: value for name, value in family.defaults.items() if name not in stated and value not in _OFF}


def position_boundaries(read: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of tokens within the context beyond which a wrong window or scaling shows, by the field that states it.

    `read` is what `read_fields` gives.
    """
    scaling = read["rope_scaling"] or {}
    stated = {
        **{name: read.get(name) for name in ("sliding_window", "attention_chunk_size", "floor_scale")},
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings"),
    }
    return {
        name: tokens
        for name, tokens in stated.items()
        if tokens is not None and tokens < read["max_position_embeddings"]
    }


def in_both_spellings(config: Mapping[str, Any], family: Family, where: str = "config.json") -> dict[str, Any]:
    """A config.json that either generation reads with the same meaning: `config` with the fields that it lacks."""
    read = read_fields(config, family, where)
    theta, scaling = read["rope_theta"], read["rope_scaling"]
    both = {**config, "model_type": family.name}
    for name in {"rope_theta", family.local_rope, *([PARTIAL] if PARTIAL in family.defaults else [])} - {""}:
        if config.get(name) != read[name]:
            both[name] = read[name]
    has_class_in_4 = "proportional" not in family.rope_types  # 5 takes rope_scaling, if it is there, for all settings
    if scaling and has_class_in_4 and config.get("rope_scaling") not in (scaling, spelled_for_4(scaling)):
        both["rope_scaling"] = spelled_for_4(scaling)
    if scaling and scaling["rope_type"] == "longrope":
        both[ORIGINAL] = scaling[ORIGINAL]
    if has_class_in_4:
        both.setdefault("rope_scaling", None)
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    others = {name: stated[name] for name in family.rope_settings if name in stated}
    parameters = {**others, "rope_type": "default", **(scaling or {}), "rope_theta": theta}
    if PARTIAL in family.defaults:
        parameters[PARTIAL] = read[PARTIAL]
    if family.local_rope:
        local = {"rope_type": "default", "rope_theta": read["local_rope_theta"]}
        parameters = {FULL: parameters, SLIDING: local}
    if config.get("rope_parameters") != parameters:
        both["rope_parameters"] = parameters
    if family.old_layer_types and config.get("layer_types"):
        both["layer_types"] = read["layer_types"]
    for alias, name in family.aliases.items():
        both[alias] = both[name] = read[name]
    for name in ("num_key_value_heads", "tie_word_embeddings"):  # transformers 5 refuses null in some families
        if name in config and config[name] is None:
            both[name] = read[name]
    return both


def misread_by_4(config: Mapping[str, Any], family: Family, where: str = "config.json") -> list[str]:
    """What transformers 4 would take from a config.json instead of what it means; empty if it reads it right."""
    meant = read_fields(config, family, where)
    unknown = {"rope_parameters", *family.aliases}
    try:
        taken = read_fields({name: value for name, value in config.items() if name not in unknown}, family, where)
    except RequestError as error:
        return [error.found]
    return [f"{name} {taken[name]!r} and not {value!r}" for name, value in meant.items() if taken[name] != value]


def _contradictions(config: Mapping[str, Any], family: Family, where: str) -> Iterator[RequestError]:
    """Fields that both generations have under their own names with different values, and two classes for one model."""
    pairs = [_DTYPES, *family.aliases.items()]
    for first, second in pairs:
        found = [config.get(first), config.get(second)]
        if None not in found and len({str(value).removeprefix("torch.") for value in found}) > 1:
            yield RequestError(
                f"{first} {found[0]!r} and {second} {found[1]!r} contradict each other",
                where=where,
                needed="one value: which of the two is read depends on the version of transformers",
                action=f"keep the one that the weights have, and remove the other or make it equal: {first}, {second}",
            )
    if config.get("model_type") not in (None, family.name):
        yield RequestError(
            f"architectures {config.get('architectures')} and model_type {config['model_type']!r} contradict each "
            "other",
            where=where,
            needed=f"model_type {family.name!r}, by which transformers chooses the model's class",
            action="make both name the class that the weights belong to",
        )
    if config.get("auto_map"):
        yield RequestError(
            f"auto_map {config['auto_map']!r}",
            where=where,
            needed=f"no such field: with it transformers may run code of the folder and not {family.architectures[0]}",
            action="if that class computes what the code does, remove auto_map and the code",
        )


def _nulls(config: Mapping[str, Any], family: Family, where: str) -> Iterator[RequestError]:
    names = [
        name
        for name, default in family.defaults.items()
        if name in config and config[name] is None and default is not None and name not in _NULLABLE
    ]
    if names := sorted({*names} - {"rope_theta"}):
        yield RequestError(
            f"{', '.join(names)}: null",
            where=where,
            needed="a value, or no such field, which means the default of its class in transformers: "
            + ", ".join(f"{name} {family.defaults[name]!r}" for name in names),
        )


def _layer_types(config: Mapping[str, Any], family: Family, where: str) -> Iterator[RequestError]:
    types, layers = config.get("layer_types"), config.get("num_hidden_layers", family.defaults["num_hidden_layers"])
    known = (FULL, SLIDING) if family.has_layer_types else family.layer_types
    if types is None or (len(types) == (layers or 0) and all(name in known for name in types)):
        return
    yield RequestError(
        f"layer_types = {types!r} is not supported for {family.name}",
        where=where,
        needed=f"{' or '.join(map(repr, known))} for each of the {layers} layers, null, or no such field",
    )
