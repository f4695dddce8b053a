"""Tokens: they live in the environment of this process and its children, and nowhere else."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrainkit.logs import is_secret


def split_token(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Command-line words without --hf_token and its value, and the value (the last one, or None)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hf_token", "--hf-token", nargs="?")
    known, kept = parser.parse_known_args(list(words))
    return (list(words), None) if known.hf_token is None else (kept, known.hf_token)


def hide_token_from_process_list() -> None:
    """Restart this process with the token of --hf_token in the environment instead of the command line.

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


_PASSED_ON = re.compile(r"(HF|HUGGING_FACE|HUGGINGFACE|WANDB|MLFLOW|NCCL|DATASET|TRANSFORMERS|TOKENIZERS)_")
"""Variables of the submitting environment that are passed on to the job."""


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a scheduler's commands: without tokens and passwords, and without variables of another job."""
    return {
        name: value
        for name, value in environment.items()
        if not is_secret(name) and not name.startswith("PRETRAINKIT_")
    }


def passed_on(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that a job gets from the environment in which it is submitted: (plain ones, secret ones)."""
    meant = {name: value for name, value in sorted(environment.items()) if _PASSED_ON.match(name)}
    secret = {name: value for name, value in meant.items() if is_secret(name)}
    return {name: value for name, value in meant.items() if name not in secret}, secret


def write_secrets(path: Path, secrets: Mapping[str, str]) -> None:
    """Write a bash file that exports tokens; it is created with mode 600."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())
