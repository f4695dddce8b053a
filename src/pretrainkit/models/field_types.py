"""Types and ranges of what config.json states: they follow from the defaults of the family's class in transformers.

Of both generations, transformers 4 takes nearly everything (`"10000"`, `503.0`, `true` for 1) and fails later or
computes something else, transformers 5 refuses most of it when it opens the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.models.family import Family

DTYPES = ("bfloat16", "float16", "float32", "float64")
_TOKEN_ID = "_token_id"
_MAY_BE_ZERO = ("first_k_dense_replace", "hidden_size_per_layer_input", "num_kv_shared_layers", "num_local_experts")
_NUMBERS = ("final_logit_softcapping",)
"""Fields that are off by default and no counts."""


def wrong_types(config: Mapping[str, Any], family: Family, where: str) -> Iterator[RequestError]:
    """Every field whose value is not of its type or out of its range; null is judged elsewhere."""
    defaults = {name: value for name, value in family.defaults.items() if name != "rope_scaling"}
    for name, value in config.items():
        meaning = family.aliases.get(name, name)
        needed = ""
        if meaning in _MAY_BE_ZERO and type(value) is int and value == 0:
            continue
        if meaning in defaults:
            default = defaults[meaning]
            needed = needed_type(value, 1.0 if default is None and meaning in _NUMBERS else default)
        elif name.endswith(_TOKEN_ID):
            needed = _needed_id(value, config.get("vocab_size"), is_padding=name == "pad_token_id")
        elif name in ("dtype", "torch_dtype") and value is not None:
            is_known = isinstance(value, str) and value.removeprefix("torch.") in DTYPES
            needed = "" if is_known else f"one of {', '.join(DTYPES)}"
        if needed:
            yield RequestError(f"{name} {value!r}", where=where, needed=needed)


def needed_type(value: Any, default: Any) -> str:
    """What a value must be in the place of `default`, where it is not; a default of None stands for a count."""
    if value is None:
        return ""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int) or default is None:
        return "" if is_number and isinstance(value, int) and value > 0 else "a whole number, 1 or more"
    if isinstance(default, float):
        return "" if is_number and math.isfinite(value) and value >= 0 else "a number, 0 or more"
    return "" if isinstance(value, type(default)) else f"a {'text' if isinstance(default, str) else 'list'}"


def _needed_id(value: Any, vocab_size: Any, *, is_padding: bool) -> str:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(id, int) or isinstance(id, bool) for id in ids):
        return "the id of a token, a whole number"
    least = -1 if is_padding else 0  # Llama 1 has no padding token and says -1
    if isinstance(vocab_size, int) and any(not least <= id < vocab_size for id in ids):
        return f"the id of a token, 0 to {vocab_size - 1}: vocab_size is {vocab_size}"
    return ""
