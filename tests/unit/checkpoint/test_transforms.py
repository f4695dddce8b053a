"""Rearrangements against their definition, written out in loops."""

from __future__ import annotations

import itertools

import pytest
import torch

from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.transforms import merge_rows, padded_vocabulary, shard, split_rows, unshard
from pretrainkit.models.family import Layout

GROUPS, QUERIES, DIM, HIDDEN = 4, 3, 2, 5


def qkv(*trailing: int) -> list[torch.Tensor]:
    rows = (GROUPS * QUERIES * DIM, GROUPS * DIM, GROUPS * DIM)
    return [torch.randn(count, *trailing) for count in rows]


@pytest.mark.parametrize("trailing", [(HIDDEN,), ()], ids=["weight", "bias"])
def test_merged_qkv_is_group_by_group(trailing: tuple[int, ...]) -> None:
    query, key, value = qkv(*trailing)
    expected = []
    for group in range(GROUPS):
        for head in range(QUERIES):
            first = (group * QUERIES + head) * DIM
            expected += [query[first + i] for i in range(DIM)]
        expected += [key[group * DIM + i] for i in range(DIM)]
        expected += [value[group * DIM + i] for i in range(DIM)]
    merged = merge_rows([LazyTensor.of(part) for part in (query, key, value)], GROUPS)
    assert torch.equal(merged.tensor(), torch.stack(expected))
    parts = split_rows(merged, GROUPS, [len(part) for part in (query, key, value)])
    assert all(torch.equal(part.tensor(), whole) for part, whole in zip(parts, (query, key, value), strict=True))


def test_rank_of_a_gated_matrix_holds_its_gate_over_its_up() -> None:
    gate, up = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
    part = shard(Layout.GATED, [LazyTensor.of(gate), LazyTensor.of(up)], rank=1, size=2, groups=1, padded_rows=0)
    assert torch.equal(part.tensor(), torch.cat([gate[4:], up[4:]]))


def test_vocabulary_is_padded_with_zeros_at_the_end() -> None:
    embedding = torch.randn(263, HIDDEN)
    padded = padded_vocabulary(263, 128, 2)
    assert padded == 512
    parts = [
        shard(Layout.VOCABULARY, [LazyTensor.of(embedding)], rank=rank, size=2, groups=1, padded_rows=padded).tensor()
        for rank in range(2)
    ]
    whole = torch.cat(parts)
    assert torch.equal(whole[:263], embedding) and not whole[263:].any()


@pytest.mark.parametrize(
    ("rows", "divisor", "size", "expected"),
    [(151669, 128, 4, 152064), (263, 1, 4, 264), (128256, 128, 8, 129024), (32000, 128, 1, 32000)],
)
def test_padded_vocabulary(rows: int, divisor: int, size: int, expected: int) -> None:
    assert padded_vocabulary(rows, divisor, size) == expected


@pytest.mark.parametrize(("layout", "size"), itertools.product(Layout, (1, 2, 4)), ids=str)
def test_parts_of_all_ranks_give_the_whole(layout: Layout, size: int) -> None:
    tensors = {
        Layout.QKV: qkv(HIDDEN),
        Layout.GATED: [torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)],
        Layout.ROW: [torch.randn(3, 8)],
        Layout.VOCABULARY: [torch.randn(13, HIDDEN)],
    }.get(layout, [torch.randn(8, HIDDEN)])
    values = [LazyTensor.of(tensor) for tensor in tensors]
    parts = [shard(layout, values, rank=rank, size=size, groups=GROUPS, padded_rows=16) for rank in range(size)]
    whole = unshard(layout, parts, rows=[len(tensor) for tensor in tensors], groups=GROUPS)
    assert all(torch.equal(found.tensor(), tensor) for found, tensor in zip(whole, tensors, strict=True))
