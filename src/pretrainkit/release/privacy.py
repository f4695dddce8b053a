"""The release gate's search for access tokens and for paths of the machine, in every file of a release.

Tokens of a known form and values of fields that are named as secrets are found by detect-secrets. Its search by
entropy isn't used, since vocabularies are full of strings that look random, and neither is its verification, which asks
the service that a token belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pretrainkit.checkpoint.formats import hf_files
from pretrainkit.release.report import Check

_DETECTORS = (
    "AWSKeyDetector",
    "AzureStorageKeyDetector",
    "DiscordBotTokenDetector",
    "GitHubTokenDetector",
    "GitLabTokenDetector",
    "JwtTokenDetector",
    "NpmDetector",
    "OpenAIDetector",
    "PypiTokenDetector",
    "SendGridDetector",
    "SlackDetector",
    "SquareOAuthDetector",
    "StripeDetector",
    "TelegramBotTokenDetector",
    "TwilioKeyDetector",
)
"""Those of detect-secrets whose tokens can't be taken for a part of a vocabulary."""
_FURTHER_TOKENS = {
    "Hugging Face Token": r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "W&B Key": r"(?i:wandb)\w*[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b|\bwandb_v1_\w{40,}",
    "GitHub Token": r"\bgithub_pat_\w{30,}",
    "API Key": r"\bsk-(?:(?:proj|ant|or)-[\w-]{30,}|[A-Za-z0-9]{40,})|\bAIza[\w-]{35}",
    "Password in the form of .netrc": r"\bpassword\s+(?=\S*\d)[\w-]{20,}",
}
"""Tokens that detect-secrets 1.5 doesn't know."""
_VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"}
"""Files whose tokens may be any words: nothing is found in them by its name, such as 'password'."""
_HOME = re.compile(
    r"(?:(?<![\w./-])|file://)"
    r"(?:(?:/home/|/Users/|[A-Z]:\\+Users\\+)(?!(?:user|username|you|your[\w-]*|me|ubuntu|runner)\b)[\w.-]+"
    r"|/root/(?!\.cache\b)\w[\w.-]*)"
)
"""A home directory, except those that examples name."""
_PATH = re.compile(r"(?:/|~/)[\w.@-]+(?:/[\w.@-]+)+/?")
_SEARCHED_BYTES = 256_000_000
"""A larger file isn't searched; the largest tokenizers have 40 MB."""


def check_privacy(released: Path, notes: list[str]) -> Iterator[Check]:
    """Search all files of a release, and what its weight files say of themselves; paths in binary files are noted."""
    problems: list[str] = []
    for path in sorted(path for path in released.rglob("*") if path.is_file()):
        name = str(path.relative_to(released))
        if hf_files.is_weight_file(path):
            with suppress(SafetensorError), safe_open(path, framework="np") as file:
                problems += problems_of_text(f"{name} (metadata)", json.dumps(file.metadata() or {}))
        elif path.stat().st_size > _SEARCHED_BYTES:
            problems.append(f"{name} is too large to be searched")
        else:
            content = path.read_bytes()
            text = content.decode("utf-8", errors="replace")
            if b"\0" not in content:
                problems += problems_of_text(name, text)
            else:
                problems += [f"{name} holds what looks like a secret ({kind})" for kind in _tokens(text)]
                notes += [f"{name} holds the local path {found}" for found in _homes(text)]
    yield Check.of("no access tokens and no local paths", problems, "none")


def problems_of_text(name: str, text: str) -> Iterator[str]:
    """Secrets and local paths in the text of a file of this name."""
    is_vocabulary = Path(name).name in _VOCABULARIES
    kinds = _tokens(text) | (set() if is_vocabulary else _named_secrets(text))
    for kind in sorted(kinds):
        yield f"{name} holds what looks like a secret ({kind})"
    paths = _homes(text)
    if name.endswith(".json") and not is_vocabulary:
        with suppress(ValueError):
            paths |= set(_json_paths(json.loads(text)))
    for path in sorted(paths):
        yield f"{name}: local path {path}"


def _tokens(text: str) -> set[str]:
    """The kinds of tokens in a text that are recognised by their form."""
    kinds = {kind for kind, pattern in _FURTHER_TOKENS.items() if re.search(pattern, text)}
    return kinds | {detector.secret_type for detector in _detectors() if any(detector.analyze_string(text))}


@cache
def _detectors() -> list[Any]:
    from detect_secrets.core.plugins.initialize import from_plugin_classname

    return [from_plugin_classname(name) for name in _DETECTORS]


def _named_secrets(text: str) -> set[str]:
    """The kinds of secrets in a text that are recognised by what stands around them."""
    from detect_secrets.plugins.basic_auth import BasicAuthDetector
    from detect_secrets.plugins.keyword import CONFIG_DENYLIST_REGEX_TO_GROUP, KeywordDetector
    from detect_secrets.plugins.private_key import PrivateKeyDetector

    keyword, basic, key = KeywordDetector(), BasicAuthDetector(), PrivateKeyDetector()
    kinds = {key.secret_type} if any(key.analyze_string(text)) else set()
    if any(map(_is_generated, basic.analyze_string(text))):
        kinds.add(basic.secret_type)
    for line in text.splitlines():
        if any(map(_is_generated, keyword.analyze_string(line, CONFIG_DENYLIST_REGEX_TO_GROUP))):
            kinds.add(keyword.secret_type)
    return kinds


def _is_generated(value: str) -> bool:
    """Whether a value may be a secret and not a word, a sentence or a placeholder, such as YOUR_API_KEY."""
    return bool(re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=-]{16,}", value))


def _homes(text: str) -> set[str]:
    own = str(Path.home())
    found = {match[0] for match in _HOME.finditer(text)}
    return found | ({own} if own.count("/") > 1 and re.search(rf"{re.escape(own)}\b", text) else set())


def _json_paths(value: Any, name: str = "") -> Iterator[str]:
    """Strings in JSON that are absolute paths, and relative ones in fields `name_or_path`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _json_paths(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _json_paths(inner)
    elif isinstance(value, str) and (
        _PATH.fullmatch(value) or (name.lstrip("_") == "name_or_path" and value.startswith(("/", "~", "./", "../")))
    ):
        yield value
