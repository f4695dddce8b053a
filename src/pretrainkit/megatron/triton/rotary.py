"""Rotary position embedding in Triton, called where Megatron calls Transformer Engine's.

The fused query/key/value kernel reads the projection once and writes rotated queries, rotated keys and values to
separate tensors in one launch; plain torch takes about twenty. liger-kernel's starts from separate tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    mixed,
    query,
    key,
    value,
    angles,
    batch,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    OTHERS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_POWER_OF_2: tl.constexpr,
    HALF_POWER_OF_2: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """All heads of one token, rotated by its angles.

    `mixed` has GROUPS groups of QUERIES query heads and OTHERS more heads (one key and one value head, or none); each
    output has heads of one kind. BACKWARD computes the gradient of `mixed` from the outputs', with negated angles.
    """
    token = tl.program_id(0).to(tl.int64)
    per_group: tl.constexpr = QUERIES + OTHERS
    total: tl.constexpr = GROUPS * per_group
    size: tl.constexpr = 2 * HALF

    column = tl.arange(0, HALF_POWER_OF_2)
    angle = tl.load(angles + (token // batch) * size + column, mask=column < HALF, other=0.0)
    cosine, sine = tl.cos(angle), tl.sin(angle)
    if BACKWARD:
        sine = -sine

    head = tl.arange(0, HEADS_POWER_OF_2)
    group, place = head // per_group, head % per_group
    exists = (head < total)[:, None] & (column < HALF)[None, :]
    is_query = exists & (place < QUERIES)[:, None]
    is_key = exists & (place == QUERIES)[:, None]
    is_value = exists & (place > QUERIES)[:, None]
    low = column[None, :]
    mixed += token * total * size + head[:, None] * size + low
    query += token * GROUPS * QUERIES * size + (group * QUERIES + place)[:, None] * size + low
    key += token * GROUPS * size + group[:, None] * size + low
    value += token * GROUPS * size + group[:, None] * size + low

    if BACKWARD:
        first = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
        second = tl.load(query + HALF, mask=is_query, other=0.0).to(tl.float32)
        if OTHERS:
            first += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
            second += tl.load(key + HALF, mask=is_key, other=0.0).to(tl.float32)
            first += tl.load(value, mask=is_value, other=0.0).to(tl.float32)
            second += tl.load(value + HALF, mask=is_value, other=0.0).to(tl.float32)
    else:
        first = tl.load(mixed, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(mixed + HALF, mask=exists, other=0.0).to(tl.float32)

    rotated_first = tl.where(is_value, first, first * cosine[None, :] - second * sine[None, :])
    rotated_second = tl.where(is_value, second, second * cosine[None, :] + first * sine[None, :])
    if BACKWARD:
        tl.store(mixed, rotated_first.to(mixed.dtype.element_ty), mask=exists)
        tl.store(mixed + HALF, rotated_second.to(mixed.dtype.element_ty), mask=exists)
    else:
        tl.store(query, rotated_first.to(query.dtype.element_ty), mask=is_query)
        tl.store(query + HALF, rotated_second.to(query.dtype.element_ty), mask=is_query)
        if OTHERS:
            tl.store(key, rotated_first.to(key.dtype.element_ty), mask=is_key)
            tl.store(key + HALF, rotated_second.to(key.dtype.element_ty), mask=is_key)
            tl.store(value, rotated_first.to(value.dtype.element_ty), mask=is_value)
            tl.store(value + HALF, rotated_second.to(value.dtype.element_ty), mask=is_value)


def _launch(
    mixed: Tensor, parts: tuple[Tensor, Tensor, Tensor], angles: Tensor, queries: int, others: int, backward: bool
) -> None:
    length, batch, groups = mixed.shape[:3]
    half = angles.size(-1) // 2
    heads = groups * (queries + others)
    _rotate[(length * batch,)](
        mixed,
        *parts,
        angles,
        batch,
        GROUPS=groups,
        QUERIES=queries,
        OTHERS=others,
        HALF=half,
        HEADS_POWER_OF_2=triton.next_power_of_2(heads),
        HALF_POWER_OF_2=triton.next_power_of_2(half),
        BACKWARD=backward,
    )


class RotateQkv(torch.autograd.Function):
    """Autograd function of `rotate_qkv`."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        length, batch, groups, width = mixed.shape
        size = width // (queries + 2)
        query = mixed.new_empty((length, batch, groups * queries, size))
        key, value = mixed.new_empty((2, length, batch, groups, size))
        _launch(mixed, (query, key, value), angles, queries, 2, backward=False)
        ctx.angles, ctx.queries, ctx.shape = angles, queries, mixed.shape
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        query, key, value = (gradient.contiguous() for gradient in gradients)
        mixed = query.new_empty(ctx.shape)
        _launch(mixed, (query, key, value), ctx.angles, ctx.queries, 2, backward=True)
        return mixed, None, None


class RotateHeads(torch.autograd.Function):
    """Autograd function of `rotate_heads`."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, angles: Tensor) -> Tensor:
        heads = heads.contiguous()
        rotated = torch.empty_like(heads)
        _launch(heads[:, :, None], (rotated, rotated, rotated), angles, heads.size(2), 0, backward=False)
        ctx.angles = angles
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rotated = gradient.contiguous()
        heads = torch.empty_like(rotated)
        _launch(heads[:, :, None], (rotated, rotated, rotated), ctx.angles, heads.size(2), 0, backward=True)
        return heads, None


def rotate_qkv(
    mixed: Tensor, query_angles: Tensor, key_angles: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [s, b, h, d], rotated keys and values [s, b, g, d] of a fused projection.

    `mixed` [s, b, g, (h / g + 2) d] is contiguous. The angles [s, 1, 1, d] are in radians, equal in both halves of d,
    and the same for queries and keys (self-attention). `widths` are those of a group's queries, key and value. The
    signature is that of Transformer Engine's `apply_fused_qkv_rotary_pos_emb`, which Megatron calls.
    """
    return RotateQkv.apply(mixed, query_angles, widths[0] // widths[1])


def rotate_heads(heads: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Heads [s, b, h, d] rotated by angles [s, 1, 1, d]: Megatron's `fused_apply_rotary_pos_emb`."""
    if interleaved:
        raise NotImplementedError("interleaved rotary embeddings (GPT-J's) are not supported")
    return RotateHeads.apply(heads, angles)
