"""Rotary settings of a config.json of either generation of transformers: base, scaling, rotated part of a head.

What a config.json states in several places must agree: each generation lets one of them win silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrainkit.config.schema import RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.family import FULL, SLIDING, Family
from pretrainkit.models.field_types import needed_type

ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_TRUNCATE = "truncate"
_LLAMA3 = {name: getattr(RopeScaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)}
_SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "llama3": _LLAMA3,
    "linear": {"factor": 8.0},
    "yarn": {"factor": 8.0, ORIGINAL: 8192},
    "dynamic": {"factor": 8.0},
    "longrope": {"short_factor": [], "long_factor": []},
    "proportional": {},
}
"""Rotary scalings that are supported, with the settings of each; each of them must be there."""
_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "yarn": {
        **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 1.0),
        _TRUNCATE: True,
    },
    "longrope": {ORIGINAL: 8192},
}
"""Their settings that may be absent."""


@dataclass
class _Stated:
    """What config.json states of rotary embeddings, by the place where it does."""

    bases: dict[str, float] = field(default_factory=dict)
    scalings: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    local_bases: dict[str, float] = field(default_factory=dict)


def read_rope(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """What config.json means by all that it states of rotary embeddings: `rope_theta`, `rope_scaling` (None, or a
    dict), and where the family has them `partial_rotary_factor` and `local_rope_theta`.
    """
    stated = _stated_rope(config, family, where)
    for values in (stated.bases, stated.parts, stated.local_bases):
        if len(set(values.values())) > 1:
            raise RequestError(
                " and ".join(f"{name} {value!r}" for name, value in values.items()) + " contradict each other",
                where=where,
                needed="one value: transformers 4 reads the field outside, transformers 5 rope_parameters",
                action="set all of them to what the model was trained with",
            )
    scalings = stated.scalings
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        raise RequestError(
            f"rope_scaling {config['rope_scaling']!r} and rope_parameters {config['rope_parameters']!r} contradict "
            "each other",
            where=where,
            needed="one rotary scaling: transformers 4 reads rope_scaling, transformers 5 rope_parameters",
            action="make both say how the model was trained",
        )
    if not stated.bases and family.local_rope == "rope_theta":
        raise RequestError(
            "no rope_theta", where=where, needed="the base: its default in transformers 4 is not that in transformers 5"
        )
    if not stated.bases and "rope_theta" in config:
        raise RequestError(
            "rope_theta: null",
            where=where,
            needed=f"a number, or no such field, which means {family.defaults['rope_theta']}",
        )
    theta = float(next(iter(stated.bases.values()), family.defaults["rope_theta"]))
    # A family has a scaling by default (Apertus) where none is stated.
    default = None if scalings else family.defaults.get("rope_scaling")
    scaling = next((scaling for scaling in scalings.values() if scaling), default)
    read: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if PARTIAL in family.defaults:
        read[PARTIAL] = float(next(iter(stated.parts.values()), family.defaults[PARTIAL]))
    if family.local_rope:
        local = next(iter(stated.local_bases.values()), None)
        default_local = theta if family.local_rope == "rope_theta" else family.defaults[family.local_rope]
        read["local_rope_theta"] = float(default_local if local is None else local)
        if family.local_rope != "rope_theta":
            read[family.local_rope] = read["local_rope_theta"]
    if scaling and scaling["rope_type"] == "yarn":
        _check_yarn(config, scaling, read.get(PARTIAL, 1), family, where)
    if scaling and scaling["rope_type"] == "longrope":
        _check_longrope(config, scaling, read.get(PARTIAL, 1), family, where)
    return read


def _stated_rope(config: Mapping[str, Any], family: Family, where: str) -> _Stated:
    stated = _Stated()
    if config.get("rope_theta") is not None:
        stated.bases["rope_theta"] = config["rope_theta"]
    if PARTIAL in family.defaults and config.get(PARTIAL) is not None:
        stated.parts[PARTIAL] = config[PARTIAL]
    if family.local_rope not in ("", "rope_theta") and config.get(family.local_rope) is not None:
        stated.local_bases[family.local_rope] = config[family.local_rope]
    for name in ("rope_scaling", "rope_parameters"):
        settings, place = config.get(name), f"{where}: {name}"
        if not settings and (name not in config or name == "rope_parameters"):
            continue
        if name == "rope_parameters" and family.local_rope:
            settings, local = _by_type_of_layer(settings, place)
            base, scaling, _ = _read_parameters(local, f"{place}.{SLIDING}", family)
            if scaling or base is None:
                raise RequestError(
                    f"{local!r}", where=f"{place}.{SLIDING}", needed="rope_type 'default', and its rope_theta"
                )
            stated.local_bases[f"{name}.{SLIDING}.rope_theta"] = base
        base, scaling, part = _read_parameters(settings or {}, place, family)
        if name == "rope_parameters" and family.local_rope and base is None:
            raise RequestError("no rope_theta", where=f"{place}.{FULL}", needed="the rotary base")
        if scaling and scaling["rope_type"] == "longrope":  # whose old context length is a field outside
            scaling = {ORIGINAL: config.get(ORIGINAL, family.defaults[ORIGINAL]), **scaling}
        stated.scalings[name] = scaling
        if part is None and scaling and scaling["rope_type"] == "proportional" and name == "rope_parameters":
            raise RequestError(f"rope type 'proportional' lacks {PARTIAL}", where=place)
        if base is not None:
            stated.bases[f"{name}.rope_theta"] = base
        if part is not None and PARTIAL in family.defaults:
            stated.parts[f"{name}.{PARTIAL}"] = part
    return stated


def _by_type_of_layer(settings: Any, where: str) -> tuple[Any, Any]:
    """The settings of layers without and with a window."""
    if not isinstance(settings, Mapping) or settings.keys() != {FULL, SLIDING}:
        raise RequestError(
            f"{settings!r}",
            where=where,
            needed=f"an object with {FULL} and {SLIDING}, as transformers 5 reads it for this family",
        )
    return settings[FULL], settings[SLIDING]


def _check_yarn(config: Mapping[str, Any], scaling: Mapping[str, Any], part: float, family: Family, where: str) -> None:
    """Refuse what transformers 4, which takes the factor from the context lengths, computes otherwise than 5."""
    context = config.get("max_position_embeddings", family.defaults["max_position_embeddings"])
    if scaling["factor"] * scaling[ORIGINAL] != context:
        raise RequestError(
            f"yarn with factor {scaling['factor']} from {scaling[ORIGINAL]} tokens, and max_position_embeddings "
            f"{context}",
            where=where,
            needed=f"max_position_embeddings = factor x {ORIGINAL}: transformers 4 computes the factor from them",
            action=f"set max_position_embeddings to {scaling['factor'] * scaling[ORIGINAL]:.0f}",
        )
    if part != 1:
        raise RequestError(f"yarn with {PARTIAL} {part}", where=where, needed=f"{PARTIAL} 1.0")


def spelled_for_4(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling` as transformers 4 reads it: of longrope it takes these three fields only."""
    if scaling["rope_type"] != "longrope":
        return dict(scaling)
    return {"type": "longrope", **{name: scaling[name] for name in ("short_factor", "long_factor")}}


def _check_longrope(
    config: Mapping[str, Any], scaling: Mapping[str, Any], part: float, family: Family, where: str
) -> None:
    outside = config.get(ORIGINAL, family.defaults[ORIGINAL])
    if scaling[ORIGINAL] != outside:
        raise RequestError(
            f"{ORIGINAL} {outside!r} and {scaling[ORIGINAL]!r} in rope_parameters contradict each other",
            where=where,
            needed="one value: the field outside is what either generation of transformers computes with",
        )
    heads, hidden = (config.get(name, family.defaults[name]) for name in ("num_attention_heads", "hidden_size"))
    count = int((config.get("head_dim") or hidden // heads) * part) // 2
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != count or any(needed_type(value, 1.0) or not value for value in scaling[name]):
            raise RequestError(
                f"{name} with {len(scaling[name])} values", where=where, needed=f"{count} numbers above 0"
            )


def _read_parameters(
    stated: Any, where: str, family: Family
) -> tuple[float | None, dict[str, Any] | None, float | None]:
    """The rotary base that a set of rotary settings states, if it does, its scaling, and the rotated part of a head."""
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
    if kind not in family.rope_types:
        needed = " or ".join(map(repr, family.rope_types))
        raise RequestError(f"rope type {kind!r} is not supported for {family.name}", where=where, needed=needed)
    part = parameters.pop(PARTIAL, None)
    if part not in (None, 1) and PARTIAL not in family.defaults:
        raise RequestError(f"{PARTIAL} = {part!r} is not supported", where=where, needed="1.0")
    if family.local_rope and parameters.get(_TRUNCATE, True) is not True:
        # transformers 5 doesn't read it where it is stated by type of layer.
        raise RequestError(f"{_TRUNCATE} = {stated[_TRUNCATE]!r} is not supported", where=where, needed="true")
    parameters = {name: value for name, value in parameters.items() if name not in ("rope_type", "type")}
    known = _SCALINGS[kind]
    if missing := [name for name in known if parameters.get(name) is None]:
        raise RequestError(f"rope type {kind!r} lacks {', '.join(missing)}", where=where)
    optional = {**_OPTIONAL.get(kind, {}), **family.rope_settings}
    types = {"rope_theta": 1.0, PARTIAL: 1.0, **known, **optional}
    wrong = {name: needed_type(value, types[name]) for name, value in stated.items() if name in types}
    RequestError.raise_all(
        [
            RequestError(f"{name} {stated[name]!r}", where=where, needed=needed)
            for name, needed in wrong.items()
            if needed
        ]
    )
    if unknown := sorted(parameters.keys() - {*known, *optional}):
        raise RequestError(f"unknown rope settings: {', '.join(unknown)}", where=where)
    return theta, None if kind == "default" else {"rope_type": kind, **parameters}, part
