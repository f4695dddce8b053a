"""Sequences of one length in Arrow files: the format, its manifest, and reading it.

A packed dataset is a folder that `datasets.load_from_disk` reads, with `packed.json` next to its files. A row is a
sequence: `input_ids` (list of int32, sequence_length long) and `document_lengths` (list of int32, the lengths of
the pieces of documents in it, in order; what is left up to sequence_length is padding). Sets made by `concat` also
have `documents.npy`: the lengths (int32) of the documents of their stream, of the last one only what is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pretrainkit.data.indexed.manifest import DataRecord, TokenizerRecord, contaminated_note
from pretrainkit.data.names import PACKED_RECORD
from pretrainkit.errors import DataError, RequestError
from pretrainkit.files import hash_file

DOCUMENTS = "documents.npy"
"""In sets made by `concat`: the lengths of the documents in their stream."""
IGNORED_LABEL = -100


@dataclass(frozen=True)
class InputState:
    """An input file as it was read: while its size, times and inode are the same, it need not be read again."""

    name: str
    """Path below the folder that was named as input, or the file's name."""
    num_bytes: int
    modified_ns: int
    inode: int
    changed_ns: int = 0
    """Time of its last change, of whatever kind, by the kernel: no program can set it, as it can `modified_ns`."""
    xxh3_128: str = ""
    """Over the XXH3-128 digests of its pieces of 4 MiB, as the data engine takes it; empty: not read yet."""

    @property
    def content(self) -> tuple[str, int, str]:
        """What makes two inputs equal, whenever and wherever they were written."""
        return self.name, self.num_bytes, self.xxh3_128


@dataclass(frozen=True)
class PackedFile:
    """One Arrow file."""

    name: str
    num_bytes: int
    xxh3_128: str
    num_sequences: int


@dataclass(frozen=True)
class PackedManifest(DataRecord):
    """A packed dataset's record; in its folder, which gets its name when all is complete."""

    FORMAT = "pretrainkit-packed-1"
    fingerprint: str
    """Of the settings and the inputs' hashes."""
    settings: dict[str, Any]
    """How it was made: tokenizer, names and sizes of inputs, packing, versions of libraries."""
    inputs: tuple[InputState, ...]
    """The files that were read; of a hub dataset none."""
    sequence_length: int
    packing: str
    """`concat` or `bestfit`."""
    num_sequences: int
    num_tokens: int
    """Of documents; padding is none."""
    num_padding: int
    num_dropped: int
    """Tokens at the end that didn't fill a sequence."""
    padding_id: int
    documents: dict[str, Any]
    """The manifest of the documents (`pretrainkit.data.indexed.manifest`): inputs, counts of records, EOD policy."""
    tokenizer: TokenizerRecord
    files: tuple[PackedFile, ...]
    lengths_xxh3_128: str = ""
    """Of `documents.npy`, in hex; empty without it, and in sets of older versions."""
    elapsed_s: float = 0.0
    finished_at: str = ""
    pretrainkit_version: str = ""

    @property
    def summary(self) -> str:
        """One line: counts of records and sequences."""
        counts = self.documents
        return (
            f"{counts['num_records']} records in = {counts['num_documents']} documents + {counts['num_empty']} empty"
            f" + {counts['num_rejected']} rejected{contaminated_note(counts.get('num_contaminated', 0))};"
            f" {self.num_sequences} sequences of {self.sequence_length},"
            f" {self.num_tokens} tokens, {self.num_padding} padding, {self.num_dropped} dropped at the end"
        )


def is_packed_folder(path: Path | str) -> bool:
    """Whether a folder is a packed dataset."""
    return (Path(path) / PACKED_RECORD).is_file()


def read_packed_manifest(folder: Path) -> PackedManifest | None:
    """The record of a packed dataset; None when there is no set. Raises DataError when it can't be read as one."""
    return PackedManifest.read(folder / PACKED_RECORD)


def packed_damage(folder: Path, manifest: PackedManifest, *, reads: bool = False) -> str:
    """What is wrong with a set's files, in words; empty if nothing. Looks at sizes; with `reads` at all bytes."""
    wanted: list[tuple[Path, int | None, str]] = [
        (folder / entry.name, entry.num_bytes, entry.xxh3_128) for entry in manifest.files
    ]
    if manifest.packing == "concat":
        wanted.append((folder / DOCUMENTS, None, manifest.lengths_xxh3_128))
    for path, num_bytes, digest in wanted:
        if not path.is_file():
            return f"{path.name} is missing"
        status = path.stat()
        if num_bytes is not None and status.st_size != num_bytes:
            return f"{path.name} has {status.st_size} bytes, its record says {num_bytes}"
        state = path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        if reads and digest and _hash_once(*state) != digest:
            return f"{path.name} holds other bytes than were written"
    return ""


@lru_cache(maxsize=1024)
def _hash_once(path: Path, *_: int) -> str:
    """A file's XXH3-128; processes that wait for a set ask again and again."""
    return hash_file(path, xxhash.xxh3_128)


def _view(array: Any) -> NDArray[np.int32]:
    """An Arrow array's own memory. Its to_numpy would import pandas first, for a quarter of a second and 25 MB."""
    assert array.offset == 0 and array.null_count == 0
    buffer = array.buffers()[1]
    return np.frombuffer(buffer, np.int32, len(array)) if buffer is not None else np.zeros(0, np.int32)


class PackedDataset:
    """A packed dataset, memory-mapped, so all processes of a machine share its pages. Usable as a torch dataset."""

    def __init__(self, folder: Path | str) -> None:
        """Raises RequestError when the set is missing or incomplete."""
        import pyarrow as pa

        self.folder = Path(folder)
        try:
            manifest = read_packed_manifest(self.folder)
        except DataError as error:
            raise RequestError(error.found, where=error.where) from error
        if manifest is None:
            raise RequestError(
                "no packed dataset here",
                where=str(folder),
                needed=PACKED_RECORD,
                action="build one with tools/pack_dataset.py",
            )
        self.manifest = manifest
        if damage := packed_damage(self.folder, manifest):
            raise RequestError(damage, where=str(folder), action="copy the folder again, or run pack_dataset.py again")
        self._columns: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        ends = [0]
        for entry in manifest.files:
            for batch in pa.ipc.open_stream(pa.memory_map(str(self.folder / entry.name))):
                ids, pieces = batch.column("input_ids"), batch.column("document_lengths")
                self._columns.append((_view(ids.values), _view(pieces.values), _view(pieces.offsets)))
                ends.append(ends[-1] + batch.num_rows)
        self._ends = np.array(ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedDataset, (self.folder,)

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        batch = int(np.searchsorted(self._ends, number, side="right")) - 1
        return batch, number - int(self._ends[batch])

    def input_ids(self, number: int) -> NDArray[np.int32]:
        """The ids of a sequence, a view of the file."""
        length = self.manifest.sequence_length
        return self.tokens(number * length, length)

    def tokens(self, begin: int, count: int) -> NDArray[np.int32]:
        """`count` ids from place `begin` on of all sequences one after the other, padding included."""
        length, parts = self.manifest.sequence_length, []
        while count > 0:
            batch, row = self._place(begin // length)
            ids = self._columns[batch][0]
            first = row * length + begin % length
            parts.append(ids[first : first + count])
            begin, count = begin + len(parts[-1]), count - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def document_lengths(self, number: int) -> NDArray[np.int32]:
        """The lengths of the pieces of documents in a sequence, without padding."""
        batch, row = self._place(number)
        _, pieces, offsets = self._columns[batch]
        return pieces[offsets[row] : offsets[row + 1]]

    def __getitem__(self, number: int) -> dict[str, NDArray[np.int64]]:
        """A sequence with labels (padding ignored) and position ids that restart at every document."""
        ids = self.input_ids(number).astype(np.int64)
        lengths = self.document_lengths(number)
        num_tokens = int(lengths.sum())
        labels = ids.copy()
        labels[num_tokens:] = IGNORED_LABEL
        positions = np.arange(len(ids), dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        positions[:num_tokens] -= np.repeat(begins, lengths)
        positions[num_tokens:] = 0
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


class PackedDocuments:
    """A packed dataset as training reads it, with the part of Megatron's IndexedDataset that training uses.

    Of a set made by `concat` the documents of the stream that it was cut from; of one made by `bestfit` the rows: each
    is a sample, split and counted like a document. Raises RequestError when the set is incomplete or damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        self._set, self.path_prefix = PackedDataset(folder), str(folder)
        manifest = self._set.manifest
        self.tokenizer = manifest.tokenizer
        """Which gave the ids."""
        self.num_tokens = manifest.num_tokens
        """Without padding."""
        self.has_eod = manifest.settings["eod_id"] is not None
        """Whether a token ends every document."""
        self.row_length = manifest.sequence_length if manifest.packing == "bestfit" else None
        self._path = self._set.folder / DOCUMENTS
        if self.row_length is not None:
            self.sequence_lengths: NDArray[np.int32] = np.full(len(self._set), self.row_length, np.int32)
            return
        try:
            self.sequence_lengths = np.load(self._path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise RequestError(f"not readable: {error}", where=str(self._path)) from error
        self._begins = np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths
        if int(self.sequence_lengths.sum(dtype=np.int64)) != self.num_tokens:
            raise RequestError("its documents are not those of the sequences", where=str(self._path))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def data_hash(self) -> str:
        """Changes when the content does, not its place."""
        content = [entry.xxh3_128 for entry in self._set.manifest.files]
        content = [*content, hash_file(self._path)] if self.row_length is None else ["rows", *content]
        return hashlib.sha256(" ".join(content).encode()).hexdigest()

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        """Ids of a document of the stream from `offset` on, `length` of them or all that follow."""
        count = int(self.sequence_lengths[idx]) - int(offset)
        if length is not None:
            count = min(count, int(length))
        return self._set.tokens(int(self._begins[idx]) + int(offset), count)

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids [row_length] of a row, and the lengths of the documents in it; padding follows them."""
        return self._set.input_ids(number), self._set.document_lengths(number)
