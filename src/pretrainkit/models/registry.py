"""Finds the family of a Hugging Face folder and reads the shape that its config.json describes.

Plain JSON: neither torch nor transformers is imported, and no code of the folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_FIELDS
from pretrainkit.models.family import Family
from pretrainkit.models.hf_config import read_fields
from pretrainkit.models.multimodal import TEXT_MODELS, text_config

_NAMES = (
    "apertus",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "llama",
    "llama4_text",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
)
"""The modules of this package with a family; a new one is registered here."""
_MISSING = {
    "DeepseekV32ForCausalLM": "an indexer that chooses the tokens which attention is to (DeepSeek sparse attention)",
}
"""What architectures have that people may expect here and no layer computes yet."""
FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__package__}.{name}").FAMILY for name in _NAMES)


def family_named(name: str) -> Family:
    """The family of a ModelShape."""
    return next(family for family in FAMILIES if family.name == name)


def read_config(hf_folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model folder, of its text model if it is multimodal.

    Raises RequestError when it isn't one.
    """
    return text_config(read_whole_config(hf_folder), str(Path(hf_folder) / "config.json"))


def read_whole_config(hf_folder: str | Path) -> dict[str, Any]:
    """The same with all parts of a multimodal model."""
    path = Path(hf_folder) / "config.json"
    if not path.is_file():
        raise RequestError(
            "not a Hugging Face model folder: no config.json in it",
            where=str(hf_folder),
            needed="a local folder with config.json",
            action="download the model first, for example with `huggingface-cli download ID --local-dir FOLDER`",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise RequestError("not a JSON object", where=str(path))
    return config


def find_family(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family that config.json names. Raises RequestError that lists what is supported."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise RequestError(f"architectures {architectures!r}", where=where, needed="a list of class names")
    for family in FAMILIES:
        if architectures and all(name in family.architectures for name in architectures):
            return family
    supported = sorted([*TEXT_MODELS, *(name for family in FAMILIES for name in family.architectures)])
    raise RequestError(
        f"architecture {', '.join(architectures) or 'missing'} (model_type {config.get('model_type')!r})"
        " is not supported" + "".join(f": it has {_MISSING[name]}" for name in architectures if name in _MISSING),
        where=where,
        needed=f"one of {', '.join(supported)}",
    )


def read_shape(hf_folder: str | Path, *, ignore_fields: Iterable[str] = ()) -> ModelShape:
    """The architecture that a Hugging Face folder's config.json describes.

    Raises RequestError for an unknown architecture, an unsupported setting and an unknown field, which may change
    what the model computes. `ignore_fields` names unknown fields that don't.
    """
    return shape_of(read_config(hf_folder), str(Path(hf_folder) / "config.json"), ignore_fields=ignore_fields)


def shape_of(config: Mapping[str, Any], where: str, *, ignore_fields: Iterable[str] = ()) -> ModelShape:
    """The same of the content of a config.json; `where` is named in messages."""
    family = find_family(config, where)
    _check_fields(config, family, set(ignore_fields), where)
    return family.shape(read_fields(config, family, where))


def _check_fields(config: Mapping[str, Any], family: Family, ignored: set[str], where: str) -> None:
    problems = []
    fields = DECODER_FIELDS | family.fields
    for name, values in fields.fixed.items():
        if name in config and config[name] not in values and name not in fields.read:
            problems.append(
                RequestError(
                    f"{name} = {config[name]!r} is not supported for {family.name}",
                    where=where,
                    needed=f"{name} = {' or '.join(json.dumps(value) for value in values)}",
                )
            )
    known = fields.read | fields.ignored | fields.fixed.keys() | family.aliases.keys() | ignored
    # Neither private fields of transformers nor ids of special tokens can affect the forward pass.
    unknown = sorted(
        name for name in config.keys() - known if not name.startswith("_") and not name.endswith("_token_id")
    )
    if unknown:
        problems.append(
            RequestError(
                f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}",
                where=where,
                needed="fields with a known effect on what the model computes",
                action=f"where they change nothing in the forward pass: --ignore-config-fields {' '.join(unknown)}, "
                "or, to train, take them out of config.json",
            )
        )
    RequestError.raise_all(problems)
