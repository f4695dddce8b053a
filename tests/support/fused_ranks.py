"""Ranks on CPU that train with every fused kernel, in Triton's interpreter, and with layers that are replayed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
from torch import Tensor

from pretrainkit.config import run_file as run_files
from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.engine import trainer
from pretrainkit.megatron import cuda_graphs
from pretrainkit.megatron.wgrad import WgradGemm

FUSED = Kernels(
    layer_spec="torch",
    norm="triton",
    rotary="triton",
    swiglu="liger",
    cross_entropy="triton",
    weight_gradient="gemm",
    tp_comm_overlap="torch",
    cuda_graphs="torch",
)


class Again:
    """Stands for a CUDA graph: runs the body again and writes its result where the first one is."""

    count = 0

    def __init__(self, body: Callable[[], Tensor]) -> None:
        self._body, self._result = body, body().detach()

    def replay(self) -> None:
        Again.count += 1
        with torch.enable_grad():
            self._result.copy_(self._body().detach())


class CpuGraphs:
    """Stands for `cuda_graphs.CudaGraphs`."""

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], Tensor]) -> Again:
        return Again(body)

    def finish(self) -> int:
        return 0


def train(rank: int, world_size: int, *, run_file: Path) -> None:
    """`ranks.train_rank` with the kernels of a GPU."""
    use_fused_kernels()
    ranks.train_rank(rank, world_size, run_file=run_file)


def train_replaying(rank: int, world_size: int, *, run_file: Path, fused: bool = False, overlaps: bool = False) -> None:
    """`ranks.train_rank` with layers that are replayed; `overlaps`: ranks exchange while they compute."""
    if fused:
        use_fused_kernels()
    use_kernels(cuda_graphs="graphs")
    cuda_graphs.CudaGraphs = CpuGraphs
    trainer.overlaps_data_parallel = lambda run: overlaps
    ranks.train_rank(rank, world_size, run_file=run_file)
    print("replays:", Again.count)


def train_gathering(rank: int, world_size: int, *, run_file: Path) -> None:
    """`ranks.train_rank` where each parameter has a bucket of its own, which is gathered while others compute."""
    trainer.overlaps_data_parallel = lambda run: True
    trainer.DistributedDataParallelConfig = functools.partial(trainer.DistributedDataParallelConfig, bucket_size=1)
    ranks.train_rank(rank, world_size, run_file=run_file)


def use_fused_kernels() -> None:
    """Those of a GPU, in this process."""
    describe = trainer.precision_fields
    trainer.precision_fields = lambda precision: describe(precision) | {"cross_entropy_loss_fusion": True}
    WgradGemm.wgrad_gemm_accum_fp32 = WgradGemm.wgrad_gemm_accum_fp16  # for CUDA alone
    use_kernels(**dataclasses.asdict(FUSED))


def use_kernels(**choices: str) -> None:
    """Let this process read them from run.json."""
    read_run = run_files.read_run

    def read(path: Path) -> ResolvedRun:
        run = read_run(path)
        assert run.kernels
        return dataclasses.replace(run, kernels=dataclasses.replace(run.kernels, **choices))

    run_files.read_run = read
