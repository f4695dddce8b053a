"""Packing: documents cut and joined into sequences of one length. Pure arithmetic on lengths and offsets.

`concat` writes all documents one after the other and cuts every `sequence_length` tokens. `bestfit` cuts only
documents that are longer than a sequence, and puts the pieces, longest first, each where the least space is left
that holds it (best-fit packing, Ding et al. 2024, https://arxiv.org/abs/2404.10830): such documents are never
cut, and a sequence may end in padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Packing:
    """Where each piece of the documents' stream goes. Pieces are in the order of the sequences."""

    begins: NDArray[np.int64]
    """[P] token of the stream that each piece begins with."""
    lengths: NDArray[np.int32]
    """[P]"""
    first_piece: NDArray[np.int64]
    """[N + 1] pieces of sequence i are first_piece[i] to first_piece[i + 1]."""
    sequence_length: int
    num_dropped: int
    """Tokens at the end that don't fill a sequence."""

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.first_piece) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of documents, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_padding(self) -> int:
        """Positions without a token."""
        return self.num_sequences * self.sequence_length - self.num_tokens

    def sequences(self, tokens: NDArray[Any], first: int, last: int, padding_id: int) -> NDArray[np.int32]:
        """[last - first, sequence_length] ids of these sequences out of the stream's `tokens`, padded."""
        length = self.sequence_length
        begin, end = self.first_piece[first], self.first_piece[last]
        begins, lengths = self.begins[begin:end], self.lengths[begin:end]
        if self.num_padding == 0 and np.array_equal(begins[:-1] + lengths[:-1], begins[1:]):
            start = int(begins[0])
            return tokens[start : start + (last - first) * length].astype(np.int32, copy=False).reshape(-1, length)
        out = np.full((last - first, length), padding_id, np.int32)
        counts = np.diff(self.first_piece[first : last + 1])
        rows = np.repeat(np.arange(last - first), counts).tolist()
        before = np.cumsum(lengths) - lengths
        columns = (before - np.repeat(before[np.cumsum(counts) - counts], counts)).tolist()
        for row, column, start, size in zip(rows, columns, begins.tolist(), lengths.tolist(), strict=True):
            out[row, column : column + size] = tokens[start : start + size]
        return out


def pack(lengths: NDArray[np.int32], sequence_length: int, method: str) -> Packing:
    """Pack documents of these lengths by `concat` or `bestfit`."""
    return (concat if method == "concat" else bestfit)(lengths, sequence_length)


def concat(lengths: NDArray[np.int32], sequence_length: int) -> Packing:
    """Concatenate and cut; the tokens after the last full sequence are dropped."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    num_sequences = total // sequence_length
    kept = num_sequences * sequence_length
    cuts = np.arange(0, kept + 1, sequence_length, dtype=np.int64)
    bounds = np.union1d(ends[ends < kept], cuts)
    return Packing(
        begins=bounds[:-1],
        lengths=np.diff(bounds).astype(np.int32),
        first_piece=np.searchsorted(bounds, cuts),
        sequence_length=sequence_length,
        num_dropped=total - kept,
    )


def bestfit(lengths: NDArray[np.int32], sequence_length: int) -> Packing:
    """Cut only documents longer than a sequence; sequences are then shuffled, or full ones would come first."""
    lengths = lengths[lengths > 0].astype(np.int64)
    doc_begins = np.cumsum(lengths) - lengths
    num_pieces = -(-lengths // sequence_length)
    of_document = np.repeat(np.arange(len(lengths)), num_pieces)
    within = np.arange(len(of_document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    begins = doc_begins[of_document] + within * sequence_length
    sizes = np.minimum(sequence_length, lengths[of_document] - within * sequence_length)
    by_size = np.argsort(-sizes, kind="stable")
    sequences = _fit(sizes[by_size], sequence_length)
    num_sequences = int(sequences.max()) + 1 if len(sequences) else 0
    places = np.random.Generator(np.random.PCG64(SHUFFLE_SEED)).permutation(num_sequences)
    sequences = places[sequences] if num_sequences else sequences
    order = np.argsort(sequences, kind="stable")
    chosen = by_size[order]
    first_piece = np.searchsorted(sequences[order], np.arange(num_sequences + 1))
    return Packing(begins[chosen], sizes[chosen].astype(np.int32), first_piece, sequence_length, num_dropped=0)


def _fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The sequence that each piece goes to; `sizes` descend."""
    found = np.empty(len(sizes), np.int64)
    sequences_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit n is set: some sequence has space for n tokens
    num_sequences = 0
    for place, size in enumerate(sizes.tolist()):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            sequence = sequences_by_space[space].pop()
            if not sequences_by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, sequence = capacity, num_sequences
            num_sequences += 1
        found[place] = sequence
        left = space - size
        if left:
            sequences_by_space[left].append(sequence)
            spaces |= 1 << left
    return found
