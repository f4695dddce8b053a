"""Every token of every document has one place; what machine settings come from."""

from __future__ import annotations

import numpy as np
import pytest

from pretrainkit.data.packed.packing import Packing, pack
from pretrainkit.data.packed.request import machine_settings
from pretrainkit.errors import RequestError

CASES = {
    "long-and-short": [5, 40, 1, 16, 3, 17, 31, 2],
    "whole-sequences": [16, 32, 16],
    "one-token-each": [1] * 50,
    "one-document": [100],
    "with-empty": [0, 7, 0, 9, 20],
    "many": np.random.default_rng(3).integers(1, 90, 500).tolist(),
}
LENGTH = 16


def rows(packing: Packing, num_tokens: int) -> list[list[np.ndarray]]:
    """Pieces of each sequence, of a stream whose tokens are their own numbers."""
    stream = np.arange(num_tokens)
    pieces = [stream[b : b + n] for b, n in zip(packing.begins, packing.lengths, strict=True)]
    first = packing.first_piece
    return [pieces[first[i] : first[i + 1]] for i in range(packing.num_sequences)]


@pytest.mark.parametrize("name", CASES)
def test_concat_is_the_stream_cut_in_order(name: str) -> None:
    lengths = np.array(CASES[name], np.int32)
    packing = pack(lengths, LENGTH, "concat")
    found = [np.concatenate(row) for row in rows(packing, int(lengths.sum()))]
    assert np.array_equal(np.concatenate(found), np.arange(packing.num_sequences * LENGTH))
    assert all(len(row) == LENGTH for row in found)
    assert packing.num_dropped == lengths.sum() % LENGTH and packing.num_padding == 0
    ends = set(np.cumsum(lengths).tolist())
    inner = [piece[-1] + 1 for row in rows(packing, int(lengths.sum())) for piece in row[:-1]]
    assert set(inner) <= ends, "a sequence is cut into pieces at documents' ends only"


@pytest.mark.parametrize("name", CASES)
def test_bestfit_keeps_documents_whole_and_loses_nothing(name: str) -> None:
    lengths = np.array(CASES[name], np.int32)
    packing = pack(lengths, LENGTH, "bestfit")
    found = rows(packing, int(lengths.sum()))
    assert sorted(np.concatenate([piece for row in found for piece in row]).tolist()) == list(range(lengths.sum()))
    assert all(sum(map(len, row)) <= LENGTH for row in found)
    begins = (np.cumsum(lengths) - lengths).tolist()
    whole = {begin for begin, size in zip(begins, lengths.tolist(), strict=True) if 0 < size <= LENGTH}
    assert whole <= {int(piece[0]) for row in found for piece in row}
    pieces = int(np.ceil(lengths / LENGTH).sum())
    assert packing.num_sequences <= max(pieces, 1) and len(packing.lengths) == pieces
    # Two sequences that are both at most half full would have been one.
    assert sum(sum(map(len, row)) * 2 <= LENGTH for row in found) <= 1


@pytest.mark.parametrize("method", ["concat", "bestfit"])
def test_no_documents_make_no_sequence(method: str) -> None:
    assert pack(np.zeros(0, np.int32), LENGTH, method).num_sequences == 0


@pytest.mark.parametrize(
    ("cores", "gib", "wanted"),
    [(4, 16, (4, 1024, 256)), (16, 64, (16, 4096, 1024)), (96, 1024, (96, 16384, 4096)), (32, 8, (8, 1024, 256))],
    ids=["small", "normal", "large", "little-memory"],
)
def test_defaults_follow_the_machine(cores: int, gib: int, wanted: tuple[int, int, int]) -> None:
    found = machine_settings({}, cores=cores, memory_bytes=gib << 30)
    assert (found.num_proc, found.batch_size, found.writer_batch_size) == wanted


def test_flags_go_before_the_environment_and_both_are_logged() -> None:
    found = machine_settings({"DATASET_NUM_PROC": "7", "DATASET_BATCH_SIZE": "50"}, batch_size=60)
    assert (found.num_proc, found.batch_size) == (7, 60)
    assert "DATASET_NUM_PROC=7 (environment), DATASET_BATCH_SIZE=60 (flag)" in found.origins
    with pytest.raises(RequestError, match="DATASET_NUM_PROC"):
        machine_settings({"DATASET_NUM_PROC": "many"})
