"""config.json of either generation of transformers: read into the spelling that families read, written in both.

| meaning | transformers 4 | transformers 5 |
|---|---|---|
| rotary base | `rope_theta` | `rope_parameters.rope_theta` |
| rotary scaling | `rope_scaling` | `rope_parameters` |
| dtype of the weights | `torch_dtype` or `dtype` | `dtype` |
| number of experts of Qwen3-MoE | `num_experts` | `num_local_experts` |

transformers 4 ignores `rope_parameters`, and each generation lets one of two contradicting fields win silently: here
they are refused. A field that is absent has the default of the family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from pretrainkit.config.schema import RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.family import Family
from pretrainkit.models.field_types import needed_type, wrong_types

_DTYPES = ("dtype", "torch_dtype")
_LLAMA3 = {field.name: field.default for field in fields(RopeScaling)}
_SCALINGS: Mapping[str, Mapping[str, Any]] = {"default": {}, "llama3": _LLAMA3}
"""Rotary scalings that are supported, with the settings of each; each of them must be there."""
_FULL = "full_attention"
_OFF: tuple[Any, ...] = (None, False, [])
_NULLABLE = {"num_key_value_heads", "sliding_window", "tie_word_embeddings"}
"""Fields in which null has a meaning although their default may be a number: as many as heads, no window, untied."""


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
        theta, scaling = _read_rope(config, family, where)
    RequestError.raise_all(problems)
    dropped = {"rope_parameters", *_DTYPES, *family.aliases}
    known = {name: value for name, value in stated.items() if name not in dropped}
    read = {**family.defaults, **known, "rope_theta": theta, "rope_scaling": scaling, "dtype": dtype_of(config)}
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
    return {name: value for name, value in family.defaults.items() if name not in stated and value not in _OFF}


def position_boundaries(read: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of tokens within the context beyond which a wrong window or scaling shows, by the field that states it.

    `read` is what `read_fields` gives.
    """
    scaling = read["rope_scaling"] or {}
    stated = {
        "sliding_window": read.get("sliding_window"),
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
    if config.get("rope_theta") != theta:
        both["rope_theta"] = theta
    if scaling and config.get("rope_scaling") != scaling:
        both["rope_scaling"] = scaling
    both.setdefault("rope_scaling", None)
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    if config.get("rope_parameters") != parameters:
        both["rope_parameters"] = parameters
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
    taken = read_fields({name: value for name, value in config.items() if name not in unknown}, family, where)
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
    if types is not None and types != [_FULL] * (layers or 0):
        yield RequestError(
            f"layer_types = {types!r} is not supported for {family.name}",
            where=where,
            needed=f"{_FULL!r} for each of the {layers} layers, null, or no such field",
        )


def _read_rope(config: Mapping[str, Any], family: Family, where: str) -> tuple[float, dict[str, Any] | None]:
    """The rotary base and its scaling (None, or a dict), from every place in which config.json states them."""
    bases = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    scalings: dict[str, dict[str, Any] | None] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if (stated := config.get(name)) or (name in config and name == "rope_scaling"):
            inner, scalings[name] = _read_parameters(stated or {}, f"{where}: {name}")
            if inner is not None:
                bases[f"{name}.rope_theta"] = inner
    if len(set(bases.values())) > 1:
        raise RequestError(
            " and ".join(f"{name} {value!r}" for name, value in bases.items()) + " contradict each other",
            where=where,
            needed="one rotary base: transformers 4 reads rope_theta, transformers 5 rope_parameters",
            action="set all of them to the base that the model was trained with",
        )
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        raise RequestError(
            f"rope_scaling {config['rope_scaling']!r} and rope_parameters {config['rope_parameters']!r} contradict "
            "each other",
            where=where,
            needed="one rotary scaling: transformers 4 reads rope_scaling, transformers 5 rope_parameters",
            action="make both say how the model was trained",
        )
    if not bases and "rope_theta" in config:
        raise RequestError(
            "rope_theta: null",
            where=where,
            needed=f"a number, or no such field, which means {family.defaults['rope_theta']}",
        )
    theta = next(iter(bases.values()), family.defaults["rope_theta"])
    return float(theta), next((scaling for scaling in scalings.values() if scaling), None)


def _read_parameters(stated: Any, where: str) -> tuple[float | None, dict[str, Any] | None]:
    """The rotary base that a set of rotary settings states, if it does, and its scaling."""
    if not isinstance(stated, Mapping):
        raise RequestError(f"{stated!r} is not a JSON object", where=where)
    if nested := sorted(name for name, value in stated.items() if isinstance(value, Mapping)):
        raise RequestError(
            f"settings by type of layer ({', '.join(nested)}) are not supported",
            where=where,
            needed="one set of rotary settings for all layers",
        )
    parameters = dict(stated)
    theta = parameters.pop("rope_theta", None)
    kinds = {name: parameters.pop(name) for name in ("rope_type", "type") if parameters.get(name) is not None}
    kind = next(iter(kinds.values()), "default")
    if len(set(kinds.values())) > 1:
        raise RequestError(
            " and ".join(f"{name} {value!r}" for name, value in kinds.items()) + " contradict each other", where=where
        )
    if kind not in _SCALINGS:
        raise RequestError(f"rope type {kind!r} is not supported", where=where, needed="'default' or 'llama3'")
    if (partial := parameters.pop("partial_rotary_factor", None)) not in (None, 1):
        raise RequestError(f"partial_rotary_factor = {partial!r} is not supported", where=where, needed="1.0")
    parameters = {name: value for name, value in parameters.items() if name not in ("rope_type", "type")}
    known = _SCALINGS[kind]
    if missing := [name for name in known if parameters.get(name) is None]:
        raise RequestError(f"rope type {kind!r} lacks {', '.join(missing)}", where=where)
    types = {"rope_theta": 1.0, **known}
    wrong = {name: needed_type(value, types[name]) for name, value in stated.items() if name in types}
    RequestError.raise_all(
        [
            RequestError(f"{name} {stated[name]!r}", where=where, needed=needed)
            for name, needed in wrong.items()
            if needed
        ]
    )
    if unknown := sorted(parameters.keys() - set(known)):
        raise RequestError(f"unknown rope settings: {', '.join(unknown)}", where=where)
    return theta, {"rope_type": kind, **parameters} if known else None
