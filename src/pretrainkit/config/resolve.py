"""From what was asked and what is known to what will run, and warnings about that. Pure: no files and no devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrainkit.config.batch_size import samples_after, steps_within
from pretrainkit.config.schema import (
    BranchPoint,
    DatasetFacts,
    InitialWeights,
    ModelShape,
    Recompute,
    ResolvedRun,
    RunConfig,
    ValidationSet,
)
from pretrainkit.config.split import num_samples
from pretrainkit.config.training import RENAMED_KERNELS, OptimizerConfig, TrainingConfig, cooldown_steps
from pretrainkit.machine import MachineFacts
from pretrainkit.units import format_count

VOCABULARY_MULTIPLE = 128
"""The embedding's rows are padded to a multiple of this and of TP.

Megatron-LM pads to 128 x TP, which gives the embedding another shape at another TP; so padded, it has one shape at
every power of two up to 128, and optimizer state can move between them.
"""
WARMUP_SHARE = 0.01
MAX_DEFAULT_WARMUP_STEPS = 2000
COOLDOWN_SCHEDULES = ("wsd", "power")
"""The schedules that end with a decay of their own length."""


@dataclass(frozen=True)
class ValidationFacts:
    """What is known of a dataset of --valid_path."""

    name: str
    dataset: DatasetFacts
    tokens: tuple[int, ...]
    """Per prefix, of all documents."""
    tokenizers: tuple[str | None, ...]
    """As `RunFacts.dataset_tokenizers`."""

    def num_samples(self, sequence_length: int) -> int:
        """Samples in one pass."""
        return sum(num_samples(tokens, sequence_length) for tokens in self.tokens)


@dataclass(frozen=True)
class RunFacts:
    """All that is known before a run starts. What could not be found out is None, and what needs it is skipped."""

    machine: MachineFacts
    experiment_dir: str
    model: ModelShape | None = None
    hf_folder: str = ""
    initial_weights: InitialWeights | None = None
    branch: BranchPoint | None = None
    tokenizer_sha256: str | None = None
    """Of the model's tokenizer.json."""
    tokenizer_largest_id: int | None = None
    """Largest id that the model's tokenizer can give."""
    dataset: DatasetFacts | None = None
    split_tokens: tuple[tuple[int, int, int], ...] | None = None
    """Per prefix, the tokens of its training, validation and test documents."""
    dataset_tokenizers: tuple[str | None, ...] = ()
    """Per prefix, SHA-256 of the tokenizer.json that made it; None without a manifest."""
    without_eod: tuple[str, ...] = ()
    """Prefixes whose documents end with no token of their own."""
    validation_sets: tuple[ValidationFacts, ...] = ()


def world_size(config: RunConfig) -> int:
    """Ranks of the run."""
    return config.launch.num_nodes * config.launch.num_gpus


def accelerator(config: RunConfig, machine: MachineFacts) -> str:
    """cpu or gpu."""
    if config.launch.accelerator != "auto":
        return config.launch.accelerator
    return "gpu" if config.launch.executor != "local" or machine.num_gpus > 0 else "cpu"


def sequence_parallel(config: RunConfig) -> bool:
    """Whether activations are split along the sequence; with one tensor-parallel rank there is nothing to split."""
    asked = config.parallel.sequence_parallel
    return config.parallel.tensor_model_parallel_size > 1 and (asked is None or asked)


def reset_attention_mask(config: RunConfig, dataset: DatasetFacts) -> bool:
    """Whether attention stays within documents."""
    return config.data.reset_attention_mask or dataset.row_length is not None


def samples_per_epoch(config: RunConfig, split_tokens: tuple[tuple[int, int, int], ...]) -> int:
    """Training samples in one pass over the dataset; samples don't cross from one prefix to the next."""
    return sum(num_samples(training, config.data.sequence_length) for training, _, _ in split_tokens)


def max_steps(config: RunConfig, split_tokens: tuple[tuple[int, int, int], ...]) -> int:
    """Optimizer steps of the run: as asked, or one epoch without its last incomplete batch."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    return steps_within(config.training, samples_per_epoch(config, split_tokens))


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding in Megatron."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


def resolve(config: RunConfig, facts: RunFacts) -> ResolvedRun:
    """The whole run. Its request must have passed `pretrainkit.config.validate.problems_of` without a problem."""
    assert facts.model and facts.dataset and facts.split_tokens
    chosen = accelerator(config, facts.machine)
    steps = max_steps(config, facts.split_tokens)
    optimizer, precision = config.optimizer, config.training.precision
    decay, warmup = optimizer.lr_decay_steps or steps, optimizer.lr_warmup_steps
    schedule_steps = decay - (optimizer.lr_rewarm_step or 0)
    has_cooldown = optimizer.lr_schedule in COOLDOWN_SCHEDULES
    return ResolvedRun(
        config=config,
        model=facts.model,
        dataset=facts.dataset,
        experiment_dir=facts.experiment_dir,
        hf_folder=facts.hf_folder,
        initial_weights=facts.initial_weights,
        branch=facts.branch,
        accelerator=chosen,
        precision={"auto": "bf16" if chosen == "gpu" else "fp32", "fp8": "bf16"}.get(precision, precision),
        world_size=world_size(config),
        data_parallel_size=world_size(config) // config.parallel.model_parallel_size,
        sequence_parallel=sequence_parallel(config),
        max_steps=steps,
        lr_warmup_steps=min(MAX_DEFAULT_WARMUP_STEPS, int(WARMUP_SHARE * schedule_steps)) if warmup is None else warmup,
        lr_decay_steps=decay,
        lr_cooldown_steps=cooldown_steps(optimizer.lr_cooldown, schedule_steps) if has_cooldown else 0,
        min_lr=optimizer.lr / 10 if optimizer.min_lr is None else optimizer.min_lr,
        samples_per_epoch=samples_per_epoch(config, facts.split_tokens),
        padded_vocab_size=padded_vocab_size(facts.model.vocab_size, config.parallel.tensor_model_parallel_size),
        reset_attention_mask=reset_attention_mask(config, facts.dataset),
        async_save=config.training.async_save == "on" or (config.training.async_save == "auto" and chosen == "gpu"),
        recompute=_recompute(config, facts.model),
        validation_sets=_validation_sets(config, facts),
        **_gpu(config, facts.machine, chosen),
    )


def _validation_sets(config: RunConfig, facts: RunFacts) -> tuple[ValidationSet, ...]:
    training, length = config.training, config.data.sequence_length
    most = training.val_steps * training.global_batch_size
    return tuple(
        ValidationSet(each.name, each.dataset, min(most, each.num_samples(length)))
        for each in (facts.validation_sets if training.val_interval else ())
    )


def _recompute(config: RunConfig, model: ModelShape) -> Recompute:
    """What was asked for; auto is none until a GPU's memory is weighed against the run."""
    asked, stages = config.training.recompute, config.parallel.pipeline_model_parallel_size
    if asked == "full":
        return Recompute("full", config.training.recompute_layers or model.num_layers // stages)
    return Recompute("selective" if asked == "selective" else "none")


def _gpu(config: RunConfig, machine: MachineFacts, chosen_accelerator: str) -> dict[str, Any]:
    """Name and memory of the GPUs: as given, or this machine's when the run is local."""
    launch = config.launch
    if chosen_accelerator != "gpu":
        return {}
    here = launch.executor == "local" and launch.gpu_name is None
    return {
        "gpu_name": machine.gpu_name if here else launch.gpu_name,
        "gpu_memory_gib": launch.gpu_memory_gib or (machine.gpu_memory_gib if here else None),
    }


def warnings_of(run: ResolvedRun, facts: RunFacts) -> list[str]:
    """Warnings about a run that passed every check: what is valid and may have unexpected effects."""
    return [*_renamed(run), *_ranks(run, facts), *_data(run, facts), *_rope(run), *_schedule(run), *_fp8(run)]


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
    samples = samples_per_epoch(run.config, facts.split_tokens or ())
    wanted = samples_after(run.config.training, run.max_steps)
    if samples and wanted > samples:
        epochs = f"{wanted / samples:.1f} epochs of the {format_count(samples)} in the dataset"
        yield f"{format_count(wanted)} training samples are {epochs}"
    if facts.without_eod:
        more = f" and {len(facts.without_eod) - 3} more" if len(facts.without_eod) > 3 else ""
        yield (
            f"documents end without an EOD token in {', '.join(facts.without_eod[:3])}{more}: the model doesn't learn "
            "where a text ends; prepare the data again with --append-eod"
        )
    for name, path in run.config.data.valid_path.items() if not run.config.training.val_interval else ():
        yield f"--valid_path {name}={path} is not evaluated with --val_interval 0"
    for each in run.validation_sets:
        if trained := set(each.dataset.prefixes) & set(run.dataset.prefixes):
            yield f"--valid_path {each.name} is also training data: {', '.join(sorted(trained))}"
    if run.dataset.max_token_id is None:
        yield "the data has no manifest: its tokenizer and largest token id are not checked against the model"


def _rope(run: ResolvedRun) -> Iterator[str]:
    scaling, length = run.model.rope_scaling, run.config.data.sequence_length
    if run.config.rope_scaling and scaling:
        before = round(run.model.max_position_embeddings / scaling.factor)
        if length <= before:
            yield (
                f"no sample is longer than the {before} tokens that the model was made for: {length} don't train the "
                f"positions up to {run.model.max_position_embeddings} that --rope_scaling adds"
            )


def _schedule(run: ResolvedRun) -> Iterator[str]:
    optimizer, training = run.config.optimizer, run.config.training
    if run.initial_weights and optimizer.lr == OptimizerConfig.lr:
        yield (
            f"--lr {optimizer.lr:g}, the default, suits random weights, and this run starts from trained ones: a tenth "
            "of the rate that they were trained with, or less, keeps what they have learned"
        )
    if optimizer.lr_schedule == "constant" and (optimizer.min_lr is not None or optimizer.lr_decay_steps):
        yield "--min_lr and --lr_decay_steps have no effect with the constant schedule"
    elif optimizer.lr_schedule not in COOLDOWN_SCHEDULES and optimizer.lr_cooldown != OptimizerConfig.lr_cooldown:
        yield f"--lr_cooldown has no effect with the {optimizer.lr_schedule} schedule, only with wsd and power"
    elif optimizer.lr_schedule != "power" and optimizer.lr_power_a:
        yield f"--lr_power_a has no effect with the {optimizer.lr_schedule} schedule"
    elif run.lr_decay_steps > run.max_steps:
        yield f"the learning rate reaches its minimum at step {run.lr_decay_steps}, but the run ends at {run.max_steps}"
    if training.val_interval > run.max_steps:
        yield f"only one evaluation: --val_interval {training.val_interval} is larger than --max_steps {run.max_steps}"


def _fp8(run: ResolvedRun) -> Iterator[str]:
    training = run.config.training
    names = ("fp8_recipe", "fp8_first_last_bf16", "fp8_check_interval")
    changed = [f"--{name}" for name in names if getattr(training, name) != getattr(TrainingConfig, name)]
    if changed and not run.fp8:
        yield f"only --precision fp8 uses {', '.join(changed)}"
