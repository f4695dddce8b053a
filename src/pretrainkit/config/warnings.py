"""Warnings about valid requests that may have unexpected effects, logged once before the run starts."""

from __future__ import annotations

from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.config.training import RENAMED_KERNELS
from pretrainkit.units import format_count


def warnings_of(run: ResolvedRun, facts: RunFacts) -> list[str]:
    """Warnings about a run that passed every check."""
    return [*_renamed(run), *_ranks(run, facts), *_data(run, facts), *_schedule(run)]


def _renamed(run: ResolvedRun) -> Iterator[str]:
    for name in run.config.training.fused_kernels.split(","):
        if name in RENAMED_KERNELS:
            yield f"--fused_kernels {name} is now --fused_kernels {RENAMED_KERNELS[name]}; the old name will be removed"


def _ranks(run: ResolvedRun, facts: RunFacts) -> Iterator[str]:
    launch, parallel = run.config.launch, run.config.parallel
    if run.accelerator == "cpu":
        if launch.accelerator == "auto":
            yield f"no GPU found: {launch.num_gpus} processes train on the CPU"
        if launch.num_gpus > facts.machine.num_cpus:
            yield f"{launch.num_gpus} processes share {facts.machine.num_cpus} CPU cores; --num_gpus sets their number"
    if parallel.sequence_parallel and not run.sequence_parallel:
        yield "sequence_parallel has no effect with one tensor-parallel rank"
    if run.num_microbatches < parallel.pipeline_model_parallel_size:
        yield (
            f"{run.num_microbatches} micro batches per step in {parallel.pipeline_model_parallel_size} pipeline stages"
            ": some stages are always idle; a larger --global_batch_size or a smaller --micro_batch_size fills them"
        )


def _data(run: ResolvedRun, facts: RunFacts) -> Iterator[str]:
    samples = resolve.samples_per_epoch(run.config, facts.split_tokens or ())
    wanted = run.max_steps * run.config.training.global_batch_size
    if samples and wanted > samples:
        epochs = f"{wanted / samples:.1f} epochs of the {format_count(samples)} in the dataset"
        yield f"{format_count(wanted)} training samples are {epochs}"
    if run.dataset.max_token_id is None:
        yield "the data has no manifest: its tokenizer and largest token id are not checked against the model"


def _schedule(run: ResolvedRun) -> Iterator[str]:
    optimizer, training = run.config.optimizer, run.config.training
    if optimizer.lr_schedule == "constant" and (optimizer.min_lr is not None or optimizer.lr_decay_steps):
        yield "--min_lr and --lr_decay_steps have no effect with the constant schedule"
    elif run.lr_decay_steps > run.max_steps:
        yield f"the learning rate reaches its minimum at step {run.lr_decay_steps}, but the run ends at {run.max_steps}"
    if training.val_interval > run.max_steps:
        yield f"only one evaluation: --val_interval {training.val_interval} is larger than --max_steps {run.max_steps}"
