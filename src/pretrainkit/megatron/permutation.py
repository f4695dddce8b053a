"""Rows of experts: each token's hidden state once for each of its experts, sorted by expert, and their sum by token.

Megatron's own functions wait for the GPU in each layer, and add up rows by atomic operations, in another order every
time. Transformer Engine's don't; these do without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """Of T tokens, each with some of E experts, R rows: a token for each of its experts."""

    token_of_row: Tensor
    """[R] int64; rows are sorted by expert, those of an expert by token."""
    place_of_row: Tensor
    """[R] int64: of a row's token and expert in a flat [T, E] tensor."""
    by_token: Tensor
    """[R] int64: rows sorted by token, those of a token by expert."""
    begins: Tensor
    """[T + 1] int64: where a token's rows begin in `by_token`."""

    @classmethod
    def of(cls, routing_map: Tensor, num_rows: int) -> Permutation:
        """`routing_map` [T, E] bool has `num_rows` true values; their number is not read, which would wait for it."""
        tokens, experts = routing_map.shape
        by_expert = torch.nonzero_static(routing_map.T.reshape(-1), size=num_rows).view(-1)  # expert x T + token
        token = by_expert % tokens
        by_token = torch.argsort(token.to(torch.int32), stable=True)
        begins = F.pad(routing_map.sum(1).cumsum(0), (1, 0))
        return cls(token, token * experts + by_expert // tokens, by_token, begins)

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden [T, h] to [R, h]."""
        return _Rows.apply(hidden, self)

    def shares(self, probabilities: Tensor) -> Tensor:
        """The probability [R] of each row's token and expert, of probabilities [T, E]."""
        return probabilities.reshape(-1).gather(0, self.place_of_row)

    def sums(self, rows: Tensor) -> Tensor:
        """rows [R, h] to their sum by token [T, h], in fp32 inside."""
        return _Sums.apply(rows, self)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return _gather(hidden, permutation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.permutation), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return _sum(rows, permutation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.permutation), None


def _gather(tokens: Tensor, permutation: Permutation) -> Tensor:
    """tokens [T, h] to rows [R, h]."""
    if tokens.is_cuda:
        from pretrainkit.megatron.triton import rows

        return rows.gather(tokens, permutation.token_of_row)
    return tokens.index_select(0, permutation.token_of_row)


def _sum(of_rows: Tensor, permutation: Permutation) -> Tensor:
    """rows [R, h] to tokens [T, h]."""
    if of_rows.is_cuda:
        from pretrainkit.megatron.triton import rows

        return rows.sum_by_token(of_rows, permutation.by_token, permutation.begins)
    total = of_rows.new_zeros((len(permutation.begins) - 1, of_rows.size(1)), dtype=torch.float32)
    return total.index_add_(0, permutation.token_of_row, of_rows.float()).to(of_rows.dtype)
