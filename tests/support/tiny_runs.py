"""Resolved runs without files behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrainkit.config.schema import (
    DataConfig,
    DatasetFacts,
    InitialWeights,
    LaunchConfig,
    ModelShape,
    OptimizerConfig,
    ResolvedRun,
    RunConfig,
    TrainingConfig,
)


def tiny_run(
    folder: Path, *, initial_checkpoint: str | None = None, blend: bool = False, world_size: int = 1, **training: Any
) -> ResolvedRun:
    """A run of 10 samples an epoch and 4 a step; further arguments change the training's settings."""
    settings = {"global_batch_size": 4, "max_steps": 20, **training}
    return ResolvedRun(
        config=RunConfig(
            experiment="tiny",
            data=DataConfig(sequence_length=128),
            launch=LaunchConfig(num_gpus=world_size),
            optimizer=OptimizerConfig(lr=1e-3),
            training=TrainingConfig(**settings),
        ),
        model=ModelShape("llama", 2, 64, 128, 8, 2, 8, 320, 512, 10000.0, 1e-6, False),
        dataset=DatasetFacts(("/a", "/b"), (1.0, 2.0), 10, 1, None, "h")
        if blend
        else DatasetFacts(("/a",), (), 10, 1, None, "h"),
        experiment_dir=str(folder),
        hf_folder="/hf",
        initial_weights=initial_checkpoint and InitialWeights(initial_checkpoint, initial_checkpoint, None),
        accelerator="cpu",
        precision="fp32",
        world_size=world_size,
        data_parallel_size=world_size,
        sequence_parallel=False,
        max_steps=settings["max_steps"] or 10 // settings["global_batch_size"],
        lr_warmup_steps=2,
        lr_decay_steps=20,
        min_lr=1e-4,
        samples_per_epoch=10,
        padded_vocab_size=384,
    )
