"""Ranks on CPU that train with every fused kernel, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import ranks

from pretrainkit.training import kernels, nemo
from pretrainkit.training.weight_gradient import WeightGradientProduct

FUSED = kernels.Kernels(
    layer_spec="torch",
    norm="triton",
    rotary="triton",
    swiglu="liger",
    cross_entropy="triton",
    weight_gradient="product",
    exchange="torch",
)


def train(rank: int, world_size: int, *, run_file: Path) -> None:
    """`ranks.train_rank` with the kernels of a GPU."""
    describe = nemo.transformer_config_fields
    nemo.transformer_config_fields = lambda *arguments, **settings: describe(
        *arguments, **settings | {"fused_cross_entropy": True}
    )
    WeightGradientProduct.wgrad_gemm_accum_fp32 = WeightGradientProduct.wgrad_gemm_accum_fp16  # for CUDA alone
    kernels.choose_for = lambda run: FUSED
    ranks.train_rank(rank, world_size, run_file=run_file)
