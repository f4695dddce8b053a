"""Texts that spell a special token: they are counted, since what they become depends on a flag."""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpelledTokens:
    """Finds the texts in which one of a tokenizer's special tokens is spelled.

    What few texts have, the first character, is looked for first: the pattern takes ten times as long.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        begin_alike: dict[str, list[str]] = {}
        for token in filter(None, tokens):
            begin_alike.setdefault(token[0], []).append(re.escape(token))
        self._searches = {first: re.compile("|".join(group)).search for first, group in begin_alike.items()}

    def count(self, texts: list[str]) -> int:
        """The number of texts that spell any."""
        found: set[int] = set()
        for first, search in self._searches.items():
            found.update(number for number, text in enumerate(texts) if first in text and search(text))
        return len(found)
