"""Documents of a prepared dataset as text, special tokens visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.data.indexed.manifest import read_manifest
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class ShownDocument:
    """One document."""

    number: int
    ids: list[int]
    text: str


def show(prefix: Path, documents: str, tokenizer_model: str | None = None) -> Iterator[ShownDocument]:
    """Decode documents `N` or `N:M` (N included, M not) with the manifest's tokenizer, or the one given.

    Raises RequestError for a range that is not there, or an unknown tokenizer.
    """
    dataset = IndexedDataset(prefix)
    begin, end = _range(documents, dataset.num_documents)
    manifest = read_manifest(prefix)
    if tokenizer_model is None:
        if manifest is None:
            raise RequestError("no manifest tells the tokenizer", where=str(prefix), action="give --tokenizer-model")
        tokenizer_model = manifest.tokenizer.name
    file = load_tokenizer(tokenizer_model)
    if manifest is not None and file.sha256 != manifest.tokenizer.sha256:
        raise RequestError(
            f"{tokenizer_model} is not the tokenizer that made this data",
            where=str(prefix),
            needed=f"{manifest.tokenizer.name} with SHA-256 {manifest.tokenizer.sha256[:12]}...",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file.json_path))
    for number in range(begin, end):
        ids = dataset.document(number).tolist()
        yield ShownDocument(number, ids, tokenizer.decode(ids, skip_special_tokens=False))


def _range(text: str, count: int) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        begin = int(first or 0)
        end = (int(last) if last else count) if colon else begin + 1
    except ValueError:
        raise RequestError(repr(text), where="--documents", needed="N or N:M") from None
    if not 0 <= begin < end <= count:
        raise RequestError(f"{text}; there are {count} documents", where="--documents", needed=f"0 to {count - 1}")
    return begin, end
