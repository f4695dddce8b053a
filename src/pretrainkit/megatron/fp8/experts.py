"""Experts with FP8 products: of the forward pass and of the gradient of the rows.

Rows and gradients are cast with a scale a row (a token), weights with one an output row of each expert, or an input
column for the gradient of the rows. Gradients of the weights stay in bf16: their products sum over an expert's rows,
whose number changes, and FP8 products have sums of multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrainkit.megatron.experts import EndsOnHost, GroupedExperts, GroupedLinear, weight_gradient
from pretrainkit.megatron.fp8.gemm import FAST_BACKWARD, FAST_FORWARD, grouped_matmul, has_grouped_products
from pretrainkit.megatron.fp8.module import Fp8Module, computes_in_bf16
from pretrainkit.megatron.fp8.quantize import FORWARD, GRADIENT, Scaling
from pretrainkit.megatron.fp8.stats import Stats
from pretrainkit.megatron.fp8.weights import Fp8ExpertWeight


class _Fp8GroupedMatmul(torch.autograd.Function):
    """rows [t, k] times the transpose of their expert's matrix [e, n, k]; groups end at `ends` [e]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Any,
        ends: Tensor,
        on_host: EndsOnHost | None,
        copies: Fp8ExpertWeight,
        stats: Stats,
    ) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, ends)
        ctx.weight, ctx.on_host, ctx.copies, ctx.stats = weight, on_host, copies, stats
        if not len(rows):  # with many ranks all tokens of a microbatch may be others'
            return rows.new_empty((0, weight.shape[1]))
        small = Scaling().cast(rows, FORWARD, stats.of("input", rows))
        return grouped_matmul(small, copies.rows, ends, fast=FAST_FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = torch.empty_like(rows)
        if len(rows):
            small = Scaling().cast(gradient, GRADIENT, ctx.stats.of("output gradient", gradient))
            of_rows = grouped_matmul(small, ctx.copies.columns, ends, fast=FAST_BACKWARD)
        of_weight = weight_gradient(ctx.weight, gradient, rows, ends, ctx.on_host)
        return of_rows, of_weight, None, None, None, None


class Fp8GroupedLinear(GroupedLinear):
    """One matrix for each of a rank's experts, in FP8 where the device has such grouped products."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies, self.stats = Fp8ExpertWeight(Scaling()), Stats()

    def update_copies(self) -> None:
        if has_grouped_products(self.weight):
            self.copies.update(self.weight)

    def forward(self, rows: Tensor, ends: Tensor, on_host: EndsOnHost | None = None) -> Tensor:
        if computes_in_bf16() or not has_grouped_products(self.weight):
            return super().forward(rows, ends, on_host)
        self.update_copies()
        output: Tensor = _Fp8GroupedMatmul.apply(rows, self.weight, ends, on_host, self.copies, self.stats)
        return output


class Fp8GroupedExperts(GroupedExperts, Fp8Module):
    """The experts of a layer on one rank in FP8."""

    linear = Fp8GroupedLinear
    linear_fc1: Fp8GroupedLinear
    linear_fc2: Fp8GroupedLinear

    def update_copies(self) -> None:
        self.linear_fc1.update_copies()
        self.linear_fc2.update_copies()

    def stats(self) -> dict[str, Stats]:
        return {"experts' fc1": self.linear_fc1.stats, "experts' fc2": self.linear_fc2.stats}
