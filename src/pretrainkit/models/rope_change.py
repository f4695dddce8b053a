"""config.json with the rotary settings that a run changes on purpose, to train longer sequences than before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrainkit import hf_tokenizer
from pretrainkit.config.rope_change import LENGTH, NONE, ORIGINAL, parse_rope_scaling
from pretrainkit.config.schema import RunConfig
from pretrainkit.models.hf_config import in_both_spellings, read_fields
from pretrainkit.models.multimodal import with_text_config
from pretrainkit.models.registry import find_family, read_config, read_whole_config
from pretrainkit.models.rope_config import PARTIAL

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_PLACES = ("rope_theta", "rope_scaling", "rope_parameters")


def trained_config(folder: Path, config: RunConfig) -> dict[str, Any]:
    """The config.json of the (text) model that a run trains from a folder's: with --rope_theta and --rope_scaling.

    A changed one has both spellings. `max_position_embeddings` is then factor x the context length before the scaling,
    and with another base alone at least the run's sequence length. Raises RequestError for a scaling that the family's
    class in transformers doesn't compute.
    """
    stated, where = read_config(folder), str(folder / "config.json")
    if config.rope_theta is None and config.rope_scaling is None:
        return stated
    family = find_family(stated, where)
    read = read_fields(stated, family, where)
    scaling, length = _changed_scaling(read, config)
    if scaling is None and family.defaults.get("rope_scaling"):
        scaling = {"rope_type": "default"}  # without this, the family has one
    changed = {
        **{name: value for name, value in stated.items() if name not in _PLACES},
        "rope_theta": read["rope_theta"] if config.rope_theta is None else config.rope_theta,
        "rope_scaling": scaling,
        LENGTH: length,
    }
    if PARTIAL in family.defaults:
        changed[PARTIAL] = read[PARTIAL]
    if family.local_rope not in ("", "rope_theta"):
        changed[family.local_rope] = read["local_rope_theta"]
    return in_both_spellings(changed, family, f"{where} with --rope_theta or --rope_scaling")


def trained_folder(folder: Path, config: RunConfig) -> Path:
    """A model's folder with `trained_config`: itself, or a temporary one with links to its files."""
    changed = trained_config(folder, config)
    if changed == read_config(folder):
        return folder
    return hf_tokenizer.readable_folder(folder, {"config.json": with_text_config(read_whole_config(folder), changed)})


def _changed_scaling(read: Mapping[str, Any], config: RunConfig) -> tuple[dict[str, Any] | None, int]:
    """The rotary scaling of the changed model, and its context length in tokens."""
    old, before = read["rope_scaling"] or {}, context_before_scaling(read)
    if config.rope_scaling is None:  # the length of these follows from the factor
        is_fixed = old.get("rope_type") in ("yarn", "longrope")
        return read["rope_scaling"], read[LENGTH] if is_fixed else max(read[LENGTH], config.data.sequence_length)
    given = parse_rope_scaling(config.rope_scaling)
    kind, length = given["rope_type"], given.pop(LENGTH, None)
    if kind == NONE:
        return None, max(before, config.data.sequence_length)
    kept = {name: value for name, value in old.items() if name != "attention_factor"}  # it follows from the factor
    scaling = {**(kept if old.get("rope_type") == kind else {}), **given}
    if kind == "llama3":
        scaling = {**_LLAMA3, **scaling}
    if kind != "linear":
        scaling.setdefault(ORIGINAL, before)
    factor, original = scaling.get("factor"), scaling.get(ORIGINAL, before)
    if length is None:
        is_number = isinstance(factor, (int, float)) and isinstance(original, int)
        length = round(factor * original) if is_number else read[LENGTH]
    if LENGTH in scaling:  # Ministral 3 states it there, too
        scaling[LENGTH] = length
    return scaling, length


def context_before_scaling(read: Mapping[str, Any]) -> int:
    """The tokens of the context for which a model was made before its rotary embeddings were scaled.

    `read` is what `hf_config.read_fields` gives.
    """
    scaling = read["rope_scaling"] or {}
    length = read[LENGTH] / scaling["factor"] if scaling.get("rope_type") == "linear" else read[LENGTH]
    return int(scaling.get(ORIGINAL, length))
