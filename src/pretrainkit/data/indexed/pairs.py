"""The complete .bin/.idx pairs under a path, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.data.readers.inputs import natural_key
from pretrainkit.errors import DataError, RequestError


@dataclass(frozen=True)
class PairCounts:
    """Counts from the index of a pair; the .bin itself is not read."""

    prefix: Path
    num_tokens: int
    num_sequences: int
    num_documents: int
    dtype: str


def find_pairs(path: Path | str) -> list[Path]:
    """The prefixes of all complete pairs at `path`, in natural order: a prefix, one of its files, or a folder.

    A folder without pairs means all folders in it, as `preprocess_data.py --per-file` writes them.
    Raises RequestError when there is none, or half of one.
    """
    path = Path(path)
    if path.suffix in (".bin", ".idx") and path.is_file():
        path = path.with_suffix("")
    if path.is_dir():
        prefixes = _prefixes(path, path.iterdir()) or _prefixes(path, path.rglob("*"))
    else:
        prefixes = [path] if bin_path(path).is_file() or idx_path(path).is_file() else []
    if not prefixes:
        is_saved = (path / "dataset_info.json").is_file()
        raise RequestError(
            "a saved Hugging Face dataset, not packed" if is_saved else "no .bin/.idx pair here",
            where=str(path),
            needed="a folder with .bin/.idx pairs, itself or in folders below, or a prefix P of P.bin and P.idx; to "
            "train from also token shards (shard-*.tar with shard-*.json) or a packed dataset (packed.json)",
            action="make it with tools/preprocess_data.py, make_shards.py or pack_dataset.py",
        )
    halves = [half for prefix in prefixes for half in (bin_path(prefix), idx_path(prefix)) if not half.is_file()]
    if halves:
        raise RequestError(
            "half of a pair is missing: " + ", ".join(str(half) for half in halves),
            where=str(path),
            action="preprocess or copy this data again, or move the other half away",
        )
    return prefixes


def _prefixes(folder: Path, found: Iterable[Path]) -> list[Path]:
    """Those of pairs among `found`, without what a preprocessing has not finished."""
    names = {
        file.with_suffix("")
        for file in found
        if file.suffix in (".bin", ".idx") and not any(above.suffix == ".partial" for above in file.parents)
    }
    return sorted(names, key=lambda prefix: natural_key(str(prefix.relative_to(folder))))


def read_counts(prefix: Path | str) -> PairCounts:
    """Tokens, sequences and documents of a pair.

    Raises RequestError when its files contradict each other.
    """
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error
    return PairCounts(
        Path(prefix), dataset.num_tokens, dataset.num_sequences, dataset.num_documents, np.dtype(dataset.dtype).name
    )
