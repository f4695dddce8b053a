"""A run with checkpoints, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.schema import (
    DataConfig,
    DatasetFacts,
    ModelShape,
    OptimizerConfig,
    ResolvedRun,
    RunConfig,
    TrainingConfig,
)
from pretrainkit.training import resume


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., ResolvedRun]:
    """A factory of runs of 10 samples an epoch and 4 a step; keyword arguments change the training's settings."""

    def make(*, initial_checkpoint: str | None = None, blend: bool = False, **training: Any) -> ResolvedRun:
        settings = {"global_batch_size": 4, "max_steps": 20, **training}
        return ResolvedRun(
            config=RunConfig(
                experiment="tiny",
                data=DataConfig(sequence_length=128),
                optimizer=OptimizerConfig(lr=1e-3),
                training=TrainingConfig(**settings),
            ),
            model=ModelShape("llama", 2, 64, 128, 8, 2, 8, 320, 512, 10000.0, 1e-6, False),
            dataset=DatasetFacts(("/a", "/b"), (1.0, 2.0), 10, 1, None, "h")
            if blend
            else DatasetFacts(("/a",), (), 10, 1, None, "h"),
            experiment_dir=str(tmp_path),
            hf_folder="/hf",
            initial_checkpoint=initial_checkpoint,
            accelerator="cpu",
            precision="fp32",
            world_size=1,
            data_parallel_size=1,
            sequence_parallel=False,
            max_steps=settings["max_steps"] or 10 // settings["global_batch_size"],
            lr_warmup_steps=2,
            lr_decay_steps=20,
            min_lr=1e-4,
            samples_per_epoch=10,
            padded_vocab_size=384,
        )

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., resume.Checkpoint]:
    """Write a complete checkpoint of 4 samples a step; keyword arguments change its commit mark."""

    def write(step: int, *, optimizer: bool = True, state: str = "param", **mark: Any) -> resume.Checkpoint:
        folder = tmp_path / resume.CHECKPOINTS / resume.checkpoint_name(step)
        (folder / "weights").mkdir(parents=True)
        names = f"module.w optimizer.state.exp_avg.w optimizer.state.{state}.w" if optimizer else "module.w"
        (folder / "weights" / ".metadata").write_text(names)
        resume.commit(folder, **({"step": step, "consumed_samples": 4 * step, "global_batch_size": 4} | mark))
        return resume.read(folder)

    return write
