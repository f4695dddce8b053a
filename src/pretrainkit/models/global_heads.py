"""The heads of layers without a window where they are not those of layers with one (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.models.family import FULL

_SIZES = ("head_dim", "num_key_value_heads")


def global_heads(config: Mapping[str, Any], types: Sequence[str]) -> tuple[int, int]:
    """Their size and the number of their key/value heads, as published folders or transformers 5 state them.

    `types` are those of all layers. Raises RequestError for a `per_layer_config`, which transformers 5 saves, that says
    more.
    """
    groups = (config["attention_k_eq_v"] and config["num_global_key_value_heads"]) or config["num_key_value_heads"]
    if (stated := config.get("per_layer_config")) is None:
        return config["global_head_dim"], groups
    wanted = {str(layer) for layer, kind in enumerate(types) if kind == FULL}
    settings = [stated.get(layer) for layer in sorted(wanted)] if isinstance(stated, Mapping) else []
    sizes = settings[0] if settings and isinstance(settings[0], Mapping) else {}
    found = [sizes.get(name, config[name]) for name in _SIZES]
    is_known = isinstance(stated, Mapping) and stated.keys() == wanted and sizes.keys() <= {*_SIZES}
    if not is_known or any(each != sizes for each in settings) or not all(type(n) is int and n > 0 for n in found):
        needed = f"{' and '.join(_SIZES)} of each layer without a window, the same in all"
        raise RequestError(f"per_layer_config = {stated!r}", where="config.json", needed=needed)
    return found[0], found[1]
