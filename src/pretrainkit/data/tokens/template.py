"""What a tokenizer puts around a text: its template, the post-processor of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def template_ids(post_processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer.json's `post_processor` puts before and after a single text.

    Raises ValueError for a kind that the file doesn't describe in full.
    """
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return (), ()
    kind = post_processor["type"]
    if kind == "Sequence":
        first: tuple[int, ...] = ()
        last: tuple[int, ...] = ()
        for part in post_processor["processors"]:
            before, after = template_ids(part)
            first, last = (*before, *first), (*last, *after)
        return first, last
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (int(post_processor["cls"][1]),), (int(post_processor["sep"][1]),)
    if kind != "TemplateProcessing":
        raise ValueError(kind)
    known = post_processor["special_tokens"]
    found: Sequence[list[int]] = ([], [])
    after_text = False
    for piece in post_processor["single"]:
        if "Sequence" in piece:
            after_text = True
        else:
            found[after_text].extend(known[piece["SpecialToken"]["id"]]["ids"])
    return tuple(found[0]), tuple(found[1])
