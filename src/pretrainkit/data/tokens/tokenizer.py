"""A Hugging Face tokenizer as a data engine needs it: its tokenizer.json, largest id, EOD, BOS and hash.

Nothing here loads a Rust tokenizer unless the folder leaves no other way: a process that has one must not
fork, and a wrong request is refused in a fraction of a second.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.data.hub import local_folder
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_file
from pretrainkit.hf_tokenizer import CONFIG_NAME, FAST, in_both_spellings, readable_folder, stated_prefix_space
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
PLAIN_CLASSES = {
    FAST,
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
}
"""Tokenizer classes of transformers that use a complete tokenizer.json unchanged."""
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer ready to be loaded by any library that reads tokenizer.json."""

    name: str
    """Folder, file or hub id as given."""
    json_path: Path
    sha256: str
    """Of the tokenizer.json."""
    largest_id: int
    """Largest id it can give, added tokens included."""
    eod_id: int | None
    """End of document: the EOS token, or the one named instead."""
    bos_id: int | None
    special_tokens: dict[str, int]
    """Spelling and id of the added tokens marked special."""
    post_processor: dict[str, Any] | None
    """Of the tokenizer.json: what its template puts around a text."""

    @property
    def num_ids(self) -> int:
        """Ids run from 0 to num_ids - 1."""
        return self.largest_id + 1

    def need_eod(self, asked_by: str) -> int:
        """The id that ends a document. Raises RequestError, which names what asked for it, if there is none."""
        if self.eod_id is None:
            raise RequestError(
                f"{asked_by}, but this tokenizer names no EOS token",
                where=self.name,
                action="name the token that ends a document with --eod-token",
            )
        return self.eod_id

    def need_bos(self, asked_by: str) -> int:
        """The id that begins a document. Raises RequestError, which names what asked for it, if there is none."""
        if self.bos_id is None:
            raise RequestError(f"{asked_by}, but this tokenizer names no BOS token", where=self.name)
        return self.bos_id


def load_tokenizer(name: Path | str, eod_token: str | None = None) -> TokenizerFile:
    """Read a tokenizer: a folder with tokenizer.json, such a file itself, or a hub id or older folder.

    A folder without that file goes through transformers, as does one whose tokenizer_config.json says more than its
    tokenizer.json. A hub id is looked for in the hub's cache, then on the hub, once. `eod_token` replaces the EOS
    token as end of document.
    Raises RequestError when there is no such tokenizer, or it doesn't know `eod_token`.
    """
    path = Path(name).expanduser()
    if not path.exists():
        path = local_folder(str(name), where="the tokenizer")
    roles: dict[str, str] = {}
    json_path = path / "tokenizer.json" if path.is_dir() else path
    if not json_path.is_file():
        json_path, roles = _through_transformers(path)
    description = _parse(json_path)
    if path.is_dir() and not roles:
        config, token_map = in_both_spellings(path) or {}, _config(path / "special_tokens_map.json")
        roles = {role: _content(value) for role, value in {**token_map, **config}.items() if role in ROLES and value}
        if reason := _says_more(config, token_map, description, str(path)):
            LOGGER.info("%s: %s, so transformers loads it", path, reason)
            json_path, roles = _through_transformers(path)
            description = _parse(json_path)
    added = {token["content"]: int(token["id"]) for token in description["added_tokens"]}
    vocabulary = description["model"]["vocab"]
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)

    def id_of(token: str | None) -> int | None:
        if token is None or token in added:
            return added.get(token or "")
        return None if isinstance(vocabulary, list) else vocabulary.get(token)

    if eod_token is not None and id_of(eod_token) is None:
        raise RequestError(
            f"--eod-token {eod_token!r} is not in its vocabulary",
            where=str(name),
            needed="one of " + ", ".join([*added][:20]) if added else "a token that it has",
        )
    return TokenizerFile(
        name=str(name),
        json_path=json_path,
        sha256=hash_file(json_path),
        largest_id=max([largest, *added.values()]),
        eod_id=id_of(eod_token or roles.get("eos_token")),
        bos_id=id_of(roles.get("bos_token")),
        special_tokens={t["content"]: int(t["id"]) for t in description["added_tokens"] if t.get("special")},
        post_processor=description.get("post_processor"),
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        description = _config(path)
        description["model"]["vocab"]
    except (RequestError, KeyError, TypeError) as error:
        raise RequestError(
            f"not a tokenizer.json: {error.found if isinstance(error, RequestError) else error}",
            where=str(path),
            needed="a folder with tokenizer.json, that file, or the hub id of a model",
        ) from error
    description["added_tokens"] = description.get("added_tokens") or []
    return description


def _config(path: Path) -> dict[str, Any]:
    import orjson

    try:
        return orjson.loads(path.read_bytes()) if path.is_file() else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error}", where=str(path)) from error


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _says_more(config: dict[str, Any], token_map: dict[str, Any], description: dict[str, Any], where: str) -> str:
    """Why tokenizer.json alone may not be what transformers makes of the folder; empty when it is.

    `config` is in the spelling that both generations of transformers read.
    """
    kind = config.get("tokenizer_class", FAST)
    if kind not in PLAIN_CLASSES:
        return f"class {kind}"
    known = {token["content"]: token for token in description["added_tokens"]}
    for token in config.get("added_tokens_decoder", {}).values():
        listed = known.get(token["content"])
        if listed is None or any(bool(token.get(flag)) != bool(listed.get(flag)) for flag in FLAGS):
            return f"its config defines the added token {token['content']!r} differently"
    named = [value for role, value in {**token_map, **config}.items() if role in ROLES and value]
    named += config.get("additional_special_tokens") or []
    extra = config.get("extra_special_tokens") or {}
    named += list(extra.values()) if isinstance(extra, dict) else extra
    missing = [_content(token) for token in named if _content(token) not in known]
    if missing:
        return f"its config names special tokens that tokenizer.json doesn't add: {', '.join(missing)}"
    if kind != FAST and "eos_token" not in {**token_map, **config}:
        return f"class {kind} has tokens of its own"
    if config.get("from_slow") or (kind.startswith("Llama") and config.get("add_prefix_space") is not None):
        return "its config asks for another prefix space"
    prefix_space, asked = stated_prefix_space(description), bool(config.get("add_prefix_space", False))
    if prefix_space not in (None, asked):
        if kind == FAST:
            raise RequestError(
                f"add_prefix_space {str(asked).lower()} in {CONFIG_NAME}"
                f"{'' if 'add_prefix_space' in config else ' (its default)'} and {str(prefix_space).lower()} in "
                "tokenizer.json contradict each other",
                where=where,
                needed="one of them: transformers 4 gives the ids of the first, transformers 5 those of the second",
                action="set both to what the model was trained with",
            )
        return "its config asks for another prefix space"
    return ""


def _through_transformers(source: Path) -> tuple[Path, dict[str, str]]:
    """The tokenizer.json that transformers makes of a folder, in a temporary place, and its roles."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(readable_folder(source), use_fast=True, local_files_only=True)
        text = _with_every_prefix(tokenizer.backend_tokenizer.to_str(), source)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise RequestError(
                f"transformers can't load the tokenizer: {reason}",
                where=str(source),
                needed="a whole tokenizer, and the packages that it is read with in the versions of constraints.txt",
            ) from error
        raise RequestError(
            f"no tokenizer here: {reason}",
            where=str(source),
            needed="a folder with tokenizer.json, that file, or the hub id of a model",
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="pretrainkit-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    roles = {role: getattr(tokenizer, role) for role in ROLES if getattr(tokenizer, role, None)}
    return folder / "tokenizer.json", roles


def _with_every_prefix(text: str, source: Path) -> str:
    """A tokenizer.json made of tokenizer.model, whose prefix is also put before a text that begins with a space.

    transformers 5 leaves that prefix out, other than SentencePiece and transformers 4. `legacy: false` asks for it.
    """
    import orjson

    description = orjson.loads(text)
    pre_tokenizer = description.get("pre_tokenizer") or {}
    is_made = not (source / "tokenizer.json").is_file() and description.get("normalizer") is None
    is_prefixed = pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") != "never"
    if not (is_made and is_prefixed and _config(source / "tokenizer_config.json").get("legacy", True)):
        return text
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    description |= {"normalizer": {"type": "Sequence", "normalizers": [prefix, space]}, "pre_tokenizer": None}
    return orjson.dumps(description).decode()
