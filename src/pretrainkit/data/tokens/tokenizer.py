"""A Hugging Face tokenizer as a data engine needs it: its tokenizer.json, largest id, EOD, BOS and hash.

Nothing here loads a Rust tokenizer: a process that has one must not fork, and a wrong request is refused in a fraction
of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.data.hub import local_folder
from pretrainkit.data.tokens.folder_tokenizer import FolderTokenizer, read_folder
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_file
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)


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
    """What its template puts around a text, as a tokenizer.json says it."""
    template_notes: tuple[str, ...] = ()
    """Where generations of transformers put other ids around a text."""

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

    Of a folder with more than that file, AutoTokenizer decides (see `folder_tokenizer`). A hub id is looked for in the
    hub's cache, then on the hub, once. `eod_token` replaces the EOS token as end of document.
    Raises RequestError when there is no such tokenizer, or it doesn't know `eod_token`.
    """
    path = Path(name).expanduser()
    if not path.exists():
        path = local_folder(str(name), where="the tokenizer")
    if path.is_dir() and {entry.name for entry in path.iterdir()} != {"tokenizer.json"}:
        found = read_folder(path)
        for note in found.notes:
            LOGGER.warning("%s: %s", name, note)
    else:
        found = _of_file(path / "tokenizer.json" if path.is_dir() else path)
    added = found.added_tokens
    if eod_token is not None and eod_token not in added:
        raise RequestError(
            f"--eod-token {eod_token!r} is not one of its added tokens",
            where=str(name),
            needed="one of " + ", ".join([*added][:20]) if added else "a tokenizer with added tokens",
            action="name a token that no text gives, by its text",
        )
    eos, bos = eod_token or found.roles.get("eos_token"), found.roles.get("bos_token")
    return TokenizerFile(
        name=str(name),
        json_path=found.json_path,
        sha256=found.sha256,
        largest_id=found.largest_id,
        eod_id=None if eos is None else added.get(eos),
        bos_id=None if bos is None else added.get(bos),
        special_tokens={token: added[token] for token in found.special_tokens},
        post_processor=found.post_processor,
        template_notes=tuple(found.template_notes),
    )


def _of_file(path: Path) -> FolderTokenizer:
    """A tokenizer.json alone, which names no roles."""
    import orjson

    try:
        description = orjson.loads(path.read_bytes())
        vocabulary = description["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"not a tokenizer.json: {error}",
            where=str(path),
            needed="a folder with tokenizer.json, that file, or the hub id of a model",
        ) from error
    tokens = description.get("added_tokens") or []
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    return FolderTokenizer(
        json_path=path,
        sha256=hash_file(path),
        roles={},
        added_tokens={token["content"]: int(token["id"]) for token in tokens},
        special_tokens=[token["content"] for token in tokens if token.get("special")],
        largest_id=max([largest, *(int(token["id"]) for token in tokens)]),
        post_processor=description.get("post_processor"),
        notes=[],
        template_notes=[],
    )
