"""Tokens: they live in the environment of this process and its children, and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Environment variables whose values are never written anywhere."""
_FLAGS = ("--hf_token", "--hf-token")
MASK = "***"


def split_token(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Command-line words without --hf_token and its value, and the value (the last one, or None)."""
    kept: list[str] = []
    token = None
    position = 0
    while position < len(words):
        word = words[position]
        name, equals, value = word.partition("=")
        if word == "--":
            return kept + list(words[position:]), token
        if name in _FLAGS and equals:
            token = value
        elif name in _FLAGS and position + 1 < len(words):
            position += 1
            token = words[position]
        else:
            kept.append(word)
        position += 1
    return kept, token


def hide_token_from_process_list() -> None:
    """Start this process again with the token of --hf_token in the environment instead of the command line.

    Every user of a machine can read the command lines of all processes. Returns when there is no such flag.
    The time between the first start and this call can't be hidden: HF_TOKEN in the environment is better.
    """
    words = sys.argv[1:]
    kept, token = split_token(words)
    if token is None:
        return
    before = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    environment = {**os.environ, "HF_TOKEN": token}
    os.execve(sys.executable, [*before, *kept], environment)


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with the value of every token variable replaced by ***."""
    values = os.environ if environment is None else environment
    for name in TOKEN_VARIABLES:
        if token := values.get(name):
            text = text.replace(token, MASK)
    return text
