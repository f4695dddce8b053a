"""The documents at one path of --dataset_path: what opens them, and their labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.data.indexed.labels import DocumentLabels, InputLabels, OneLabel, StoredLabels, input_names
from pretrainkit.data.indexed.manifest import read_manifest
from pretrainkit.data.indexed.pair_set import SHARD_NAME, scan, several_forms
from pretrainkit.data.packed.format import PackedDocuments, is_packed_folder
from pretrainkit.data.shards.shard_set import ShardDocuments, is_shard_folder
from pretrainkit.data.shards.urls import names_shards


def documents_kind(path: Path | str) -> type[ShardDocuments] | type[PackedDocuments] | None:
    """What one path of --dataset_path means: token shards, a packed dataset, or None: .bin/.idx pairs.

    Megatron's own IndexedDataset opens pairs. Raises RequestError for a folder with other data than one set, in it or
    below.
    """
    if names_shards(path):
        return ShardDocuments
    kind = PackedDocuments if is_packed_folder(path) else ShardDocuments if is_shard_folder(path) else None
    if kind:
        prefixes, sets = scan(Path(path))
        if prefixes or len(sets) > 1:
            raise several_forms(Path(path), [*(prefix.parent for prefix in prefixes), *sets])
    return kind


def short_name(path: Path | str, others: Iterable[Path | str]) -> str:
    """The end of a path of --dataset_path, as long as it takes to tell it from others."""
    own, *split = (tuple(SHARD_NAME.sub("", str(each).rstrip("/")).split("/")) for each in (path, *others))
    distinct = {other for other in split if other != own}
    lengths = (length for length in range(1, len(own)) if not any(o[-length:] == own[-length:] for o in distinct))
    return "/".join(own[-next(lengths, len(own)) :])


def document_labels(path: Path | str, among: Sequence[Path | str] = ()) -> DocumentLabels:
    """The labels of the documents at one path of --dataset_path: those of --label-key, its inputs', or its own name.

    `among`: the paths of the dataset, which its name tells it from; names of shards, which may be URLs or what was
    downloaded from them, have their last name. Raises DataError when the stored labels are damaged.
    """
    pair = None if documents_kind(path) else IndexedDataset(path)
    manifest = read_manifest(path) if pair else None
    if pair and manifest and manifest.labels:
        return StoredLabels(path, manifest.labels)
    name = short_name(path, () if names_shards(path) else [each for each in among if not names_shards(each)])
    if pair is None or manifest is None:
        return OneLabel(name)
    if len(manifest.inputs) < 2:
        return OneLabel(name, manifest.num_tokens, manifest.num_text_bytes)
    folder = name.removesuffix(f"_{manifest.key}_document")
    names = [f"{folder}/{file}" for file in input_names([entry.path for entry in manifest.inputs])]
    inputs = zip(names, manifest.inputs, strict=True)
    return InputLabels(
        pair.sequence_lengths, [(name, entry.num_tokens, entry.num_text_bytes) for name, entry in inputs]
    )
