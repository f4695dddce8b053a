"""The values of --rope_scaling: a rotary scaling as text, such as 'yarn factor=4'."""

from __future__ import annotations

import json
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.records import did_you_mean

NONE = "none"
"""The kind that takes a model's scaling away."""
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_SETTINGS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "linear": ("factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL, LENGTH),
    "yarn": ("factor", ORIGINAL, *_YARN),
}
"""The kinds, and the settings of each."""
FORM = "KIND SETTING=VALUE ...: none, linear, llama3 or yarn, and settings as config.json names them"


def parse_rope_scaling(text: str) -> dict[str, Any]:
    """`rope_type` and the settings of a value. Raises RequestError that names what isn't one of its kind."""
    kind, *words = text.split() or [""]
    found: dict[str, Any] = {"rope_type": kind}
    if kind not in _SETTINGS:
        raise _problem(f"kind {kind!r}", did_you_mean(kind, _SETTINGS))
    for word in words:
        name, _, value = word.partition("=")
        if name not in _SETTINGS[kind]:
            known = ", ".join(_SETTINGS[kind])
            raise _problem(f"{name!r} of {kind}", f"settings of {kind}: {known}" if known else f"{kind} has none")
        if name in found:
            raise _problem(f"{name} twice", "")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise _problem(f"{name} {value!r}", "a number, true or false") from None
    return found


def _problem(found: str, action: str) -> RequestError:
    return RequestError(found, needed=FORM, action=action, where="--rope_scaling")
