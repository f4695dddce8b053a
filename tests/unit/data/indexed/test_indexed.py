from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from indexed_writer import IndexedDatasetWriter

from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path, open_pair, optimal_dtype
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.data.readers.inputs import natural_key
from pretrainkit.errors import DataError, RequestError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6]]


def test_documents_come_back_as_written(make_pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(make_pair("name.with.dots", DOCUMENTS))
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == DOCUMENTS
    dataset.release()
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == DOCUMENTS
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (4, 4, 6)
    assert dataset.dtype == np.uint16


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.dtype(np.int32)) as writer:
        writer.add_document([1, 2, 3, 4, 5], lengths=[2, 3])
        writer.add_document([6])
    dataset = IndexedDataset(tmp_path / "a")
    assert (dataset.num_documents, dataset.num_sequences) == (2, 3)
    assert dataset.document(0).tolist() == [1, 2, 3, 4, 5]
    assert dataset.sequence_lengths.tolist() == [2, 3, 1]


def test_no_document_at_all_is_a_whole_pair(make_pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(make_pair("a", []))
    assert (dataset.num_documents, dataset.num_tokens) == (0, 0)


@pytest.mark.parametrize("bad", [70_000, -1])
def test_an_id_that_does_not_fit_is_refused_and_nothing_appears(tmp_path: Path, bad: int) -> None:
    with (
        pytest.raises(DataError, match="does not fit in uint16"),
        IndexedDatasetWriter(tmp_path / "a", np.dtype(np.uint16)) as writer,
    ):
        writer.add_document([1, bad])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_ids", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (128_256, "int32")])
def test_dtype_is_megatrons_choice(num_ids: int, dtype: str) -> None:
    assert optimal_dtype(num_ids).name == dtype


def damage(prefix: Path, how: str) -> None:
    index, tokens = idx_path(prefix), bin_path(prefix)
    if how == "no index":
        index.unlink()
    elif how == "no tokens":
        tokens.unlink()
    elif how == "cut index":
        index.write_bytes(index.read_bytes()[:-8])
    elif how == "cut tokens":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif how == "longer tokens":
        tokens.write_bytes(tokens.read_bytes() + b"xx")
    elif how == "not an index":
        index.write_bytes(b"PAR1" * 20)
    else:
        index.write_bytes(index.read_bytes()[:17] + b"\x63" + index.read_bytes()[18:])


@pytest.mark.parametrize(
    "how", ["no index", "no tokens", "cut index", "cut tokens", "longer tokens", "not an index", "unknown dtype"]
)
def test_damaged_pairs_are_refused_with_the_file(make_pair: Callable[..., Path], how: str) -> None:
    prefix = make_pair("a", DOCUMENTS)
    damage(prefix, how)
    with pytest.raises(DataError, match=str(prefix)):
        IndexedDataset(prefix)
    with pytest.raises(RequestError, match=str(prefix)):
        for found in find_pairs(prefix.parent):
            open_pair(found)


def test_natural_order_compares_numbers_as_numbers() -> None:
    names = ["a10", "a9", "a", "b1", "10", "9", "a09"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "a09", "a9", "a10", "b1"]
