"""Weight gradients of many experts in one Triton GEMM that adds them to the fp32 gradient buffer.

torch's grouped GEMM gives them in bf16; to write, read and add them takes as long as to compute them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    gradient,
    rows,
    ends,
    main_grad,
    n,
    k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A tile of an expert's [n, k]: the sum over its rows of gradient [t, n] x rows [t, k]."""
    expert = tl.program_id(1)
    tiles = tl.cdiv(k, BLOCK_K)
    column_n = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    column_k = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - begin
    gradient += begin.to(tl.int64) * n
    rows += begin.to(tl.int64) * k
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in range(0, count, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)
        is_row = (row < count)[:, None]
        left = tl.load(
            gradient + row[:, None] * n + column_n[None, :], mask=is_row & (column_n < n)[None, :], other=0.0
        )
        right = tl.load(rows + row[:, None] * k + column_k[None, :], mask=is_row & (column_k < k)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    if count > 0:
        place = expert.to(tl.int64) * n * k + column_n[:, None] * k + column_k[None, :]
        is_valid = (column_n < n)[:, None] & (column_k < k)[None, :]
        tl.store(main_grad + place, tl.load(main_grad + place, mask=is_valid) + total, mask=is_valid)


BLOCKS = {"BLOCK_N": 128, "BLOCK_K": 256, "BLOCK_T": 64}


def add_weight_gradients(gradient: Tensor, rows: Tensor, ends: Tensor, main_grad: Tensor) -> None:
    """main_grad [e, n, k] fp32 += of each expert gradient [t, n]^T rows [t, k], both bf16; they end at `ends` [e]."""
    experts, n, k = main_grad.shape
    tiles = triton.cdiv(n, BLOCKS["BLOCK_N"]) * triton.cdiv(k, BLOCKS["BLOCK_K"])
    _add[(tiles, experts)](gradient, rows, ends, main_grad, n, k, **BLOCKS, num_warps=8, num_stages=3)
