"""The arithmetic-free rearrangements between Hugging Face and Megatron tensors, at any tensor parallel size.

Shapes: H hidden, D head dimension, G query groups (key/value heads), Q query heads per group, F feed-forward,
V vocabulary, P padded vocabulary, T tensor parallel size. A bias has no H dimension. Layouts must agree with
megatron-core's `SelfAttention.get_query_key_value_tensors` (QKV) and `MLP.forward` (gated).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrainkit.models.family import Layout


def padded_vocabulary(num_rows: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding in Megatron: `num_rows` rounded up to a multiple of divisible_by x TP."""
    multiple = divisible_by * tensor_parallel_size
    return -(-num_rows // multiple) * multiple


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """[G*Q*D, H], [G*D, H], [G*D, H] -> [G*(Q+2)*D, H]: per group its queries, its key, its value."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(merged: Tensor, groups: int, rows: Sequence[int]) -> list[Tensor]:
    """The inverse of `merge_qkv`; `rows` are the numbers of rows of query, key and value."""
    grouped = merged.reshape(groups, -1, *merged.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([count // groups for count in rows], dim=1)]


def shard(layout: Layout, tensors: Sequence[Tensor], *, rank: int, size: int, groups: int, padded_rows: int) -> Tensor:
    """One tensor-parallel rank's Megatron tensor, made from whole Hugging Face tensors.

    `groups` is G of the whole model; `padded_rows` is P, used for vocabulary tensors only. Padding rows are zero.
    """
    if layout is Layout.REPLICATED:
        return tensors[0]
    if layout is Layout.ROW:
        return _part(tensors[0], rank, size, dim=1)
    if layout is Layout.QKV:
        query, key, value = (_part(tensor, rank, size) for tensor in tensors)
        return merge_qkv(query, key, value, groups // size)
    if layout is Layout.VOCABULARY:
        return _vocabulary_part(tensors[0], rank, padded_rows // size)
    return _cat([_part(tensor, rank, size) for tensor in tensors])


def unshard(layout: Layout, parts: Sequence[Tensor], *, rows: Sequence[int], groups: int) -> list[Tensor]:
    """The whole Hugging Face tensors from the Megatron tensors of all ranks, in rank order.

    `rows` are the numbers of rows of the Hugging Face tensors; vocabulary rows beyond them are padding.
    """
    size = len(parts)
    if layout is Layout.REPLICATED:
        return [parts[0]]
    if layout is Layout.ROW:
        return [_cat(parts, dim=1)]
    if layout is Layout.QKV:
        split = [split_qkv(part, groups // size, [count // size for count in rows]) for part in parts]
        return [_cat(list(of_all)) for of_all in zip(*split, strict=True)]
    if layout is Layout.VOCABULARY:
        return [_cat(parts)[: rows[0]]]
    pieces = [part.split([count // size for count in rows]) for part in parts]
    return [_cat(list(of_all)) for of_all in zip(*pieces, strict=True)]


def _part(tensor: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)


def _vocabulary_part(tensor: Tensor, rank: int, rows: int) -> Tensor:
    first = rank * rows
    real = tensor[first : first + rows]
    if len(real) == rows:
        return real
    return torch.cat([real, real.new_zeros(rows - len(real), *tensor.shape[1:])])


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)
