"""Megatron's pair of files for token data: `<prefix>.bin` and `<prefix>.idx`.

`<prefix>.bin` is every token id of every sequence, one after the other, and nothing else.
`<prefix>.idx`, all little-endian:

    offset          bytes   what
    0               9       magic: "MMIDIDX" and two zero bytes
    9               8       u64, version: 1
    17              1       u8, code of the ids' dtype (`DTYPE_CODES`)
    18              8       u64, S: number of sequences
    26              8       u64, D: length of the document index (number of documents + 1)
    34              4 S     i32, tokens of each sequence
    34 + 4 S        8 S     i64, byte offset of each sequence in the .bin
    34 + 12 S       8 D     i64, document index: document d is the sequences [index[d], index[d + 1])

Must agree with `megatron/core/datasets/indexed_dataset.py`. Written here, a document is one sequence.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pretrainkit.errors import DataError, RequestError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
UINT16_CARDINALITY = 65_500
"""Megatron stores ids in 16 bits when the number of ids is below this (`DType.optimal_dtype`)."""
_BLOCK = 1 << 20
"""Entries per block where an index is written in pieces: bounds memory, large enough for the disk."""


def bin_path(prefix: Path | str) -> Path:
    """`<prefix>.bin`; the prefix may hold dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """`<prefix>.idx`; the prefix may hold dots."""
    return Path(f"{prefix}.idx")


def check_output_prefix(prefix: str) -> None:
    """Raises RequestError for a prefix without a name: its files would be hidden."""
    name = prefix.rpartition("/")[2]
    if not name or name.startswith("."):
        raise RequestError(
            f"{prefix!r} would give hidden files" if name else f"{prefix!r} is a folder",
            where="--output-prefix",
            needed="a folder and the beginning of the files' names, such as data/corpus",
        )


def optimal_dtype(num_ids: int) -> np.dtype:
    """The dtype that Megatron chooses for ids in [0, num_ids)."""
    return np.dtype(np.uint16) if num_ids < UINT16_CARDINALITY else np.dtype(np.int32)


class IndexedDataset:
    """A pair opened for reading, memory-mapped: opening costs the header only, whatever the size.

    Raises DataError when a file is absent or its structure can't be right.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        index, tokens = idx_path(prefix), bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise DataError("file not found", where=str(path), needed="both the .bin and the .idx of a dataset")
        header = index.open("rb").read(HEADER.size)
        if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise DataError(f"not an index of token data: it starts with {header[:9]!r}", where=str(index))
        _, version, code, num_sequences, index_length = HEADER.unpack(header)
        if version != 1 or code not in DTYPE_CODES:
            raise DataError(f"version {version}, dtype code {code}", where=str(index), needed="version 1, dtype 1 to 8")
        needed = HEADER.size + 12 * num_sequences + 8 * index_length
        if index_length < 1 or index.stat().st_size < needed:
            raise DataError(
                f"{index.stat().st_size} bytes",
                where=str(index),
                needed=f"{needed} bytes for what its header announces",
            )
        self.dtype: np.dtype = DTYPE_CODES[code]
        """Type of the ids."""
        self._index = np.memmap(index, mode="r", dtype=np.uint8)
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self.sequence_lengths: NDArray[np.int32] = self._index[HEADER.size : lengths_end].view(np.int32)
        """[S] tokens of each sequence."""
        self.sequence_pointers: NDArray[np.int64] = self._index[lengths_end:pointers_end].view(np.int64)
        """[S] byte offset of each sequence in the .bin."""
        self.document_indices: NDArray[np.int64] = self._index[pointers_end:needed].view(np.int64)
        """[D + 1] first sequence of each document, and the number of sequences at the end."""
        self.num_sequences: int = num_sequences
        self.num_documents: int = index_length - 1
        num_bytes = tokens.stat().st_size
        last = num_sequences - 1
        end = 0
        if num_sequences:
            end = int(self.sequence_pointers[last]) + int(self.sequence_lengths[last]) * self.dtype.itemsize
        if end != num_bytes:
            raise DataError(
                f"{num_bytes} bytes, but its index describes {end}",
                where=str(tokens),
                action="the two files are not of one run, or a copy was cut: copy or preprocess again",
            )
        self.num_tokens: int = num_bytes // self.dtype.itemsize
        self.tokens: NDArray = (
            np.memmap(tokens, mode="r", dtype=self.dtype) if num_bytes else np.zeros(0, dtype=self.dtype)
        )
        """[num_tokens] all ids, memory-mapped."""

    def release(self) -> None:
        """Drop the pages that were read from this process's memory; they may stay in the page cache."""
        if isinstance(self.tokens.base, mmap.mmap):
            self.tokens.base.madvise(mmap.MADV_DONTNEED)

    def document(self, document: int) -> NDArray:
        """The ids of one document: all of its sequences, which are consecutive."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        first, end = (int(i) for i in self.document_indices[document : document + 2])
        begin = int(self.sequence_pointers[first]) // self.dtype.itemsize if first < end else 0
        return self.tokens[begin : begin + int(self.sequence_lengths[first:end].sum())]


def write_header(file: BinaryIO, dtype: np.dtype, num_sequences: int, num_documents: int) -> None:
    """The first 34 bytes of an index."""
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    file.write(HEADER.pack(MAGIC, 1, code, num_sequences, num_documents + 1))


def write_index_tail(
    file: BinaryIO,
    sequence_lengths: NDArray[np.int32],
    itemsize: int,
    document_indices: NDArray[np.int64] | None = None,
) -> None:
    """What follows the lengths in an index: the byte offsets and the document index, in blocks.

    The lengths may be a memory map larger than memory. Without `document_indices` every sequence is a document.
    """
    offset, num_sequences = 0, len(sequence_lengths)
    for begin in range(0, num_sequences, _BLOCK):
        ends = np.cumsum(sequence_lengths[begin : begin + _BLOCK], dtype=np.int64) * itemsize + offset
        file.write(np.concatenate([[offset], ends[:-1]]).astype(np.int64).data)
        offset = int(ends[-1])
    length = num_sequences + 1 if document_indices is None else len(document_indices)
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        block = np.arange(begin, end) if document_indices is None else document_indices[begin:end]
        file.write(np.ascontiguousarray(block, dtype=np.int64).data)


def open_pair(prefix: Path | str) -> IndexedDataset:
    """A pair that a request names. Raises RequestError when a file is absent or they contradict each other."""
    try:
        return IndexedDataset(prefix)
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error
