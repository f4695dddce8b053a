"""A program that says what transformers' AutoTokenizer makes of a folder: `folder_tokenizer` runs it.

It prints a line of JSON: the record, and a tokenizer.json if the folder's own doesn't encode as AutoTokenizer does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pretrainkit.data.tokens.parity import hard_strings
from pretrainkit.data.tokens.template import template_ids
from pretrainkit.errors import RequestError, one_line
from pretrainkit.files import read_object
from pretrainkit.hf_tokenizer import (
    CONFIG_NAME,
    FAST,
    in_both_spellings,
    read_config,
    readable_folder,
    stated_prefix_space,
)

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATE_CLASSES = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Of transformers 4: classes that put BOS and EOS around a text as their config says, by default only BOS."""
EVERY_PREFIX = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ],
}
"""The normalizer that puts SentencePiece's prefix before every text."""


def describe(folder: Path) -> dict[str, Any]:
    """The answer. Raises RequestError, or whatever transformers raises."""
    import transformers
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    own_path, notes = folder / "tokenizer.json", list[str]()
    own = json.loads(Tokenizer.from_file(str(own_path)).to_str()) if own_path.is_file() else None
    if own is not None:
        _check_prefix_space(folder, own)
    tokenizer = AutoTokenizer.from_pretrained(
        readable_folder(folder), use_fast=True, local_files_only=True, trust_remote_code=False
    )
    kind, release = type(tokenizer).__name__, f"transformers {transformers.__version__}"
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    roles = {role: str(token) for role in ("bos_token", "eos_token") if (token := getattr(tokenizer, role, None))}
    if unnamed := _remove_unnamed(made, own, folder, set(roles.values())):
        notes.append(f"{release} opens it as {kind}, which adds {', '.join(unnamed)}: left out, as no file names it")
    compared = hard_strings(token["content"] for token in made["added_tokens"] if token["special"])
    if prefixed := _with_every_prefix(made, own, folder):
        if prefixed != made:
            notes.append(
                f"{release} puts no prefix before a text that begins with a space, other than SentencePiece and "
                "transformers 4: the ids are SentencePiece's"
            )
            spelled = [token["content"] for token in made["added_tokens"]]
            compared = [text for text in compared if text[:1] != " " and not any(token in text for token in spelled)]
        made = prefixed
    is_own = own is not None and _encoding(own) == _encoding(made)
    if own is not None and not is_own:
        different = [name for name, value in _encoding(own).items() if _encoding(made)[name] != value]
        notes.append(
            f"{release} opens it as {kind}, which changes what tokenizer.json says ({', '.join(different)}); the ids "
            "are those of that class"
        )
    text = json.dumps(made, ensure_ascii=False)
    used = Tokenizer.from_file(str(own_path)) if is_own else Tokenizer.from_str(text)
    _compare(used, made["post_processor"], tokenizer, compared)
    vocabulary = made["model"]["vocab"]
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    record = {
        "roles": roles,
        "added_tokens": {token["content"]: token["id"] for token in made["added_tokens"]},
        "special_tokens": [token["content"] for token in made["added_tokens"] if token["special"]],
        "largest_id": max([largest, *(token["id"] for token in made["added_tokens"])]),
        "post_processor": made["post_processor"],
        "notes": notes,
        "template_notes": _template_notes(folder, release, tokenizer),
    }
    return {"record": record, "tokenizer": None if is_own else text}


def _check_prefix_space(folder: Path, own: dict[str, Any]) -> None:
    """Raises RequestError where config and tokenizer.json contradict each other, and transformers 4 and 5 differ."""
    config = in_both_spellings(folder) or {}
    asked, prefix_space = bool(config.get("add_prefix_space", False)), stated_prefix_space(own)
    if config.get("tokenizer_class", FAST) == FAST and prefix_space not in (None, asked):
        raise RequestError(
            f"add_prefix_space {str(asked).lower()} in {CONFIG_NAME}"
            f"{'' if 'add_prefix_space' in config else ' (its default)'} and {str(prefix_space).lower()} in "
            "tokenizer.json contradict each other",
            needed="one of them: transformers 4 gives the ids of the first, transformers 5 those of the second",
            action="set both to what the model was trained with",
        )


def _remove_unnamed(made: dict[str, Any], own: dict[str, Any] | None, folder: Path, roles: set[str]) -> list[str]:
    """Remove the tokens that a class adds on its own account: an id that no file names has no row in the model."""
    if own is None:
        return []
    named = {token["content"] for token in own["added_tokens"]} | roles | {*own["model"]["vocab"]}
    for name in SIDE_FILES:
        named |= _strings(read_object(folder / name))
    unnamed = [token["content"] for token in made["added_tokens"] if token["content"] not in named]
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in named]
    return unnamed


def _strings(value: Any) -> set[str]:
    """All keys and strings in a JSON value."""
    if isinstance(value, dict):
        return {*value}.union(*map(_strings, value.values()))
    if isinstance(value, list):
        return set().union(*map(_strings, value))
    return {value} if isinstance(value, str) else set()


def _with_every_prefix(made: dict[str, Any], own: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """A tokenizer of SentencePiece that puts its prefix before every text; None where that isn't asked for.

    transformers 5 leaves it out before a text that begins with a space. `legacy: false` asks for that.
    """
    pre_tokenizer = made["pre_tokenizer"] or {}
    is_prefixed = pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") != "never"
    if own is None:
        is_asked = (read_config(folder) or {}).get("legacy", True)
    else:
        is_asked = (own["normalizer"], own["pre_tokenizer"]) == (EVERY_PREFIX, None)
    if not is_asked or not is_prefixed or made["normalizer"] is not None:
        return None
    return made | {"normalizer": EVERY_PREFIX, "pre_tokenizer": None}


def _encoding(description: dict[str, Any]) -> dict[str, Any]:
    """What decides the ids in a tokenizer.json, without what makes no difference to them."""
    model = {name: value or None for name, value in description["model"].items()}
    vocabulary = model["vocab"] or {}
    if not model.get("unk_token") or (
        model.get("byte_fallback") and all(f"<0x{i:02X}>" in vocabulary for i in range(256))
    ):
        model["unk_token"] = model["fuse_unk"] = None
    parts = {name: _without_offsets(description[name]) for name in ("normalizer", "pre_tokenizer")}
    return {**parts, "model": model, "added_tokens": sorted(description["added_tokens"], key=lambda token: token["id"])}


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_offsets(item) for name, item in value.items() if name != "trim_offsets"}
    return [_without_offsets(item) for item in value] if isinstance(value, list) else value


def _compare(used: Any, post_processor: dict[str, Any] | None, tokenizer: Any, texts: list[str]) -> None:
    """Raises RequestError where AutoTokenizer gives other ids, template included, than what is used in its place."""
    used.no_truncation()
    used.no_padding()
    try:
        first, last = template_ids(post_processor)
    except (ValueError, KeyError):  # who needs the template refuses it
        template = None
    else:
        template = [[*first, *encoding.ids, *last] for encoding in used.encode_batch(texts, add_special_tokens=False)]
    plain = [encoding.ids for encoding in used.encode_batch(texts, add_special_tokens=False)]
    for is_template, wanted in ((False, plain), (True, template)):
        if wanted is None:
            continue
        found = tokenizer(texts, add_special_tokens=is_template, truncation=False, padding=False)["input_ids"]
        for text, ours, theirs in zip(texts, wanted, found, strict=True):
            if ours != theirs:
                raise RequestError(
                    f"{text[:80]!r}: AutoTokenizer gives {theirs[:12]}, its tokenizer.json and template {ours[:12]}",
                    needed="a class that encodes as its tokenizer.json says",
                )


def _template_notes(folder: Path, release: str, tokenizer: Any) -> list[str]:
    """Where transformers 4 puts other ids around a text."""
    config = read_config(folder) or {}
    kind = str(config.get("tokenizer_class") or "")
    if release.split()[1].startswith("4.") or not kind.startswith(TEMPLATE_CLASSES):
        return []
    added = [*tokenizer("a")["input_ids"]]
    notes = []
    for name, role, place, default in (("add_bos_token", "bos", 0, True), ("add_eos_token", "eos", -1, False)):
        asked, token_id = bool(config.get(name, default)), getattr(tokenizer, f"{role}_token_id")
        if token_id is not None and asked != (added[place] == token_id):
            here, there = ("doesn't add", "does") if asked else ("adds", "doesn't")
            default_note = "" if name in config else " (the default of its class)"
            notes.append(
                f"{name} {str(asked).lower()}{default_note}: {release} {here} {role.upper()}, transformers 4 {there}"
            )
    return notes


def main() -> None:
    """Print the answer for the folder that is named."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes half of the time of importing transformers
    try:
        answer = describe(Path(sys.argv[1]))
    except RequestError as error:
        answer = {"error": error.found, "needed": error.needed, "action": error.action}
    except Exception as error:  # transformers raises errors of many types
        answer = {"error": one_line(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
