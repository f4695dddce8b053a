"""The arithmetic-free rearrangements between Hugging Face and Megatron tensors, at any tensor parallel size.

Shapes: H hidden, D head dimension, G query groups (key/value heads), Q query heads per group, F feed-forward,
V vocabulary, P padded vocabulary, T tensor parallel size. A bias has no H dimension. Layouts must agree with
megatron-core's `SelfAttention.get_query_key_value_tensors` (QKV) and `MLP.forward` (gated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.models.family import Layout


def padded_vocabulary(num_rows: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding in Megatron: `num_rows` rounded up to a multiple of divisible_by x TP."""
    multiple = divisible_by * tensor_parallel_size
    return -(-num_rows // multiple) * multiple


def local_shape(layout: Layout, shape: tuple[int, ...], *, size: int, padded_rows: int) -> tuple[int, ...]:
    """Shape of one rank's Megatron tensor; `shape` is that of the entire tensor without vocabulary padding."""
    if layout is Layout.REPLICATED:
        return shape
    rows, *rest = shape
    if layout is Layout.ROW:
        return (rows, rest[0] // size, *rest[1:])
    return ((padded_rows if layout is Layout.VOCABULARY else rows) // size, *rest)


def merge_rows(parts: Sequence[LazyTensor], groups: int) -> LazyTensor:
    """[G*Q*D, H], [G*D, H], [G*D, H] -> [G*(Q+2)*D, H]: per group its queries, its key, its value.

    With one group: one part after another.
    """
    counts = [part.shape[0] // groups for part in parts]
    return LazyTensor.joined(
        part.rows(group * count, count) for group in range(groups) for part, count in zip(parts, counts, strict=True)
    )


def split_rows(merged: LazyTensor, groups: int, rows: Sequence[int]) -> list[LazyTensor]:
    """The inverse of `merge_rows`; `rows` are the numbers of rows of each part."""
    step, values, first = sum(rows) // groups, [], 0
    for count in (total // groups for total in rows):
        values.append(LazyTensor.joined(merged.rows(group * step + first, count) for group in range(groups)))
        first += count
    return values


def shard(
    layout: Layout, values: Sequence[LazyTensor], *, rank: int, size: int, groups: int, padded_rows: int
) -> LazyTensor:
    """One tensor-parallel rank's Megatron tensor, made from complete Hugging Face tensors.

    `groups` is G of the entire model; `padded_rows` is P, used for vocabulary tensors only. Padding rows are zero.
    """
    if layout is Layout.REPLICATED:
        return values[0]
    if layout is Layout.ROW:
        tensor = values[0].tensor()
        length = tensor.shape[1] // size
        return replace(values[0], blocks=(tensor.narrow(1, rank * length, length),))
    if layout is Layout.VOCABULARY:
        (value,), count = values, padded_rows // size
        padding = torch.zeros(padded_rows - value.shape[0], *value.shape[1:], dtype=value.dtype)
        return LazyTensor.joined([value, LazyTensor.of(padding)]).rows(rank * count, count)
    parts = [value.rows(rank * value.shape[0] // size, value.shape[0] // size) for value in values]
    return merge_rows(parts, groups // size if layout is Layout.QKV else 1)


def unshard(layout: Layout, parts: Sequence[LazyTensor], *, rows: Sequence[int], groups: int) -> list[LazyTensor]:
    """The complete Hugging Face tensors from the Megatron tensors of all ranks, in rank order.

    `rows` are the numbers of rows of the Hugging Face tensors; vocabulary rows beyond them are padding.
    """
    size = len(parts)
    if layout is Layout.REPLICATED:
        return [parts[0]]
    if layout is Layout.ROW:
        return [parts[0] if size == 1 else _side_by_side(parts)]
    if layout is Layout.VOCABULARY:
        return [LazyTensor.joined(parts).rows(0, rows[0])]
    counts, groups = [count // size for count in rows], groups // size if layout is Layout.QKV else 1
    split = [split_rows(part, groups, counts) for part in parts]
    return [LazyTensor.joined(of_all) for of_all in zip(*split, strict=True)]


def _side_by_side(parts: Sequence[LazyTensor]) -> LazyTensor:
    """[R, C1, ...], [R, C2, ...] -> [R, C1 + C2, ...]."""
    rows, _, *rest = parts[0].shape
    shape = (rows, sum(part.shape[1] for part in parts), *rest)
    return LazyTensor.computed(
        shape,
        parts[0].dtype,
        lambda first, count: torch.cat([part.rows(first, count).tensor() for part in parts], dim=1),
    )
