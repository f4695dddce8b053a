"""tokenizer_config.json of either generation of transformers, and folders that the installed one can open.

| meaning | transformers 4 | transformers 5 |
|---|---|---|
| what tokenizer.json says | `PreTrainedTokenizerFast` | `TokenizersBackend`, or the older name |
| further special tokens | `additional_special_tokens` | `extra_special_tokens` (a list), or the older name |
| space before a text | `add_prefix_space`, whatever tokenizer.json says | what tokenizer.json says |

transformers 4 fails on the names of transformers 5.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.files import read_json

CONFIG_NAME = "tokenizer_config.json"
BACKEND, FAST = "TokenizersBackend", "PreTrainedTokenizerFast"


def read_config(folder: Path) -> dict[str, Any] | None:
    """The tokenizer_config.json of a folder, None where it has none. Raises RequestError when it isn't one."""
    return _object(folder / CONFIG_NAME)


def in_both_spellings(folder: Path) -> dict[str, Any] | None:
    """The tokenizer_config.json of a folder so that either generation reads it with the same meaning.

    None where the folder has none. A file of transformers 4 stays as it is: transformers 5 reads it. Raises
    RequestError when it names further special tokens twice, and differently.
    """
    config, path = read_config(folder), folder / CONFIG_NAME
    if config is None:
        return None
    both = dict(config)
    if isinstance(config.get("extra_special_tokens"), list):
        tokens = both.pop("extra_special_tokens")
        if config.get("additional_special_tokens") not in (None, [], tokens):
            raise RequestError(
                f"extra_special_tokens {tokens} and additional_special_tokens {config['additional_special_tokens']} "
                "contradict each other",
                where=str(path),
                needed="one list: transformers 4 reads additional_special_tokens, transformers 5 extra_special_tokens",
                action="keep the one that the tokenizer was made with",
            )
        both["additional_special_tokens"] = tokens
    if config.get("tokenizer_class") == BACKEND:
        both["tokenizer_class"] = FAST
        prefix_space = stated_prefix_space(_object(folder / "tokenizer.json") or {})
        if prefix_space not in (None, both.get("add_prefix_space", False)):
            both["add_prefix_space"] = prefix_space
    return both


def stated_prefix_space(tokenizer: Mapping[str, Any]) -> bool | None:
    """Whether a tokenizer.json puts a space before a text; None where transformers 4 can't change that."""
    prefix_space = (tokenizer.get("pre_tokenizer") or {}).get("add_prefix_space")
    return None if prefix_space is None else bool(prefix_space)


def readable_folder(folder: Path, rewritten: Mapping[str, Any] | None = None) -> Path:
    """A folder with the same tokenizer that the installed transformers opens: `folder` itself where it does.

    Otherwise a temporary one, for the life of the process: links to its files, but `rewritten` (file name to JSON)
    and tokenizer_config.json in the spelling that both generations read.
    """
    files = dict(rewritten or {})
    if installed_generation() < 5 and (both := in_both_spellings(folder)) != read_config(folder):
        files[CONFIG_NAME] = both
    if not files:
        return folder
    copy = Path(tempfile.mkdtemp(prefix="pretrainkit-hf-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for path in folder.resolve().iterdir():
        if path.name in files:  # the installed transformers reads these otherwise
            (copy / path.name).write_text(json.dumps(files[path.name], indent=2), encoding="utf-8")
        else:
            (copy / path.name).symlink_to(path)
    return copy


def installed_generation() -> int:
    """The major version of the installed transformers, which is not imported for it."""
    return int(version("transformers").split(".")[0])


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, if there is one; numbers of any size stay what they are."""
    if not path.is_file():
        return None
    try:
        value = read_json(path)
    except ValueError as error:
        raise RequestError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise RequestError("not a JSON object", where=str(path))
    return value
