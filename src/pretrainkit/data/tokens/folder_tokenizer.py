"""What transformers' AutoTokenizer makes of a tokenizer folder: asked once, in a process of its own, then remembered.

A folder may say more than its tokenizer.json, or contradict it: a class that builds its own tokenizer, added tokens in
another file, add_bos_token. So AutoTokenizer decides. Its answer is kept in `pretrainkit/tokenizers/` below
XDG_CACHE_HOME (else ~/.cache), under a hash of the folder's files and the versions of the packages that read them:
importing transformers takes a second, and starts threads, after which a process must not fork.

| of a folder | transformers 4 | transformers 5 |
|---|---|---|
| `LlamaTokenizerFast`, byte-level tokenizer | BOS, unless `add_bos_token` is false | tokenizer.json's template |
| `Qwen2Tokenizer`, also by `model_type` qwen2 | what tokenizer.json says | NFC and Qwen2's pattern |
| Llama 2's tokenizer.json or tokenizer.model | prefix before every text | none before a text that begins with a space |
| neither tokenizer_config.json nor config.json | can't load it | what tokenizer.json says |

In the third case the ids here are those of transformers 4 and SentencePiece: such models were trained with them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.files import atomic_folder, hash_file, read_json

FORMAT = 1
"""Of what is remembered, and of how it is found out."""
PACKAGES = ("transformers", "tokenizers", "sentencepiece", "protobuf", "tiktoken")
PATTERNS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "*.py"),
    *("config.json", "added_tokens.json", "special_tokens_map.json"),
)
"""Files that AutoTokenizer reads."""


@dataclass(frozen=True)
class FolderTokenizer:
    """The tokenizer of a folder."""

    json_path: Path
    """The folder's own tokenizer.json where AutoTokenizer encodes as it says, else one that AutoTokenizer made."""
    sha256: str
    """Of that file."""
    roles: dict[str, str]
    """`bos_token` and `eos_token`, where there are any."""
    added_tokens: dict[str, int]
    special_tokens: list[str]
    """Those of the added tokens that are marked special."""
    largest_id: int
    post_processor: dict[str, Any] | None
    notes: list[str]
    """Where the generations of transformers, or its class and tokenizer.json, differ."""
    template_notes: list[str]
    """The same of what is put around a text."""


def read_folder(folder: Path) -> FolderTokenizer:
    """The tokenizer that AutoTokenizer of the installed transformers makes of a folder.

    Raises RequestError where it can't, or where its ids aren't those of the tokenizer.json that it makes.
    """
    hashes = {path.name: hash_file(path) for path in _files_of(folder)}
    key = hashlib.sha256(json.dumps([FORMAT, sorted(hashes.items()), _versions()]).encode()).hexdigest()
    answer = _cache() / key[:32]
    if not (answer / "record.json").is_file():
        answer = _remember(_ask(folder), answer)
    is_own = not (answer / "tokenizer.json").is_file()
    json_path = (folder if is_own else answer) / "tokenizer.json"
    sha256 = hashes["tokenizer.json"] if is_own else hash_file(json_path)
    return FolderTokenizer(json_path, sha256, **read_json(answer / "record.json"))


def _files_of(folder: Path) -> set[Path]:
    return {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "pretrainkit" / "tokenizers"


def _ask(folder: Path) -> dict[str, Any]:
    program = [sys.executable, "-P", "-W", "ignore", "-m", "pretrainkit.data.tokens.auto_tokenizer"]
    done = subprocess.run([*program, str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    if needed := answer.get("needed"):
        raise RequestError(answer["error"], where=str(folder), needed=needed, action=answer["action"])
    if reason := answer.get("error"):
        has_any = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
        needed = "a whole tokenizer, and the packages that it is read with in the versions of constraints.txt"
        raise RequestError(
            f"transformers can't load the tokenizer: {reason}" if has_any else f"no tokenizer here: {reason}",
            where=str(folder),
            needed=needed if has_any else "a folder with tokenizer.json, that file, or the hub id of a model",
        )
    return answer


def _remember(answer: dict[str, Any], place: Path) -> Path:
    """Write an answer to its place, or to a temporary one where that can't be written; gives where it is."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(place) as folder:
            _write(answer, folder)
    except OSError:
        if not (place / "record.json").is_file():  # it may be there: another process was first
            place = Path(tempfile.mkdtemp(prefix="pretrainkit-tokenizer-"))
            atexit.register(shutil.rmtree, place, ignore_errors=True)
            _write(answer, place)
    return place


def _write(answer: dict[str, Any], folder: Path) -> None:
    if answer["tokenizer"] is not None:
        (folder / "tokenizer.json").write_text(answer["tokenizer"], encoding="utf-8")
    (folder / "record.json").write_text(json.dumps(answer["record"], ensure_ascii=False), encoding="utf-8")
