"""Texts that spell a special token: they are counted, since what they become depends on a flag."""

from __future__ import annotations

from collections.abc import Iterable

LONGER = 4
"""Characters of a token that are looked for before the whole token: many tokens begin alike."""


class SpelledTokens:
    """Finds the texts in which one of a tokenizer's special tokens is spelled.

    What rules out most texts comes first: one character is looked for ten times as fast as two (memchr).
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._firsts: dict[str, dict[str, list[str]]] = {}
        for token in filter(None, tokens):
            self._firsts.setdefault(token[0], {}).setdefault(token[:LONGER], []).append(token)

    def count(self, texts: list[str]) -> int:
        """The number of texts that spell any."""
        found: set[int] = set()
        for first, beginnings in self._firsts.items():
            for number in [number for number, text in enumerate(texts) if first in text]:
                text = texts[number]
                tokens = (token for start, group in beginnings.items() if start in text for token in group)
                if any(token in text for token in tokens):
                    found.add(number)
        return len(found)
