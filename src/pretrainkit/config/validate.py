"""Everything that can be found wrong with a request without a GPU, all of it at once.

`validate_data` checks the dataset and its tokenizer, `validate_features` what a model's layers have, this module all
else: each option's value, the launch settings, the schedule, and whether ranks, batch, TP, PP, CP and sequence length
fit each other and the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.batch_size import parse_rampup
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import OPTIONS, ModelShape, RunConfig
from pretrainkit.config.training import cooldown_steps
from pretrainkit.config.validate_data import data_problems
from pretrainkit.config.validate_features import feature_problems
from pretrainkit.errors import RequestError
from pretrainkit.logs import is_secret
from pretrainkit.machine import SEMAPHORE_BYTES, MachineFacts
from pretrainkit.units import format_bytes, parse_duration

_WORKER_SEMAPHORE_BYTES = 16 * 2**10
"""Of a DataLoader's worker: a page for each semaphore of its queue."""
_BATCHES_AHEAD = 3
"""Of a DataLoader's worker: two are prefetched (torch's default), and one is in the rank's hands."""
_BYTES_PER_TOKEN = 28
"""Of a batch: token, label and position as int64, the loss mask as fp32 (megatron-core's gpt_dataset)."""


FP8_MULTIPLE = 16
"""Of the sizes of matrices in FP8 products."""


def problems_of(config: RunConfig, facts: RunFacts) -> list[RequestError]:
    """Every problem of a request. Checks that need a value already found wrong, or an unknown fact, are left out."""
    if values := [*_values(config), *_margin(config)]:
        return values
    return [
        *_launch(config),
        *_machine(config, facts),
        *_schedule(config, facts),
        *_batch(config),
        *(_model(config, facts.model) if facts.model else ()),
        *(feature_problems(config, facts.model, facts) if facts.model else ()),
        *(_sequence_length(config, facts.model) if facts.model else ()),
        *(_fp8(config, facts.model, facts.machine) if facts.model and config.training.precision == "fp8" else ()),
        *data_problems(config, facts),
        *_start_parity(config, facts),
    ]


def problems_of_launch(config: RunConfig) -> list[RequestError]:
    """The problems of where and how something is to run, for commands that have nothing else of a run."""
    values = [*_values(config, ("launch.", "training.time_")), *_margin(config)]
    return values or list(_launch(config))


def _values(config: RunConfig, prefixes: str | tuple[str, ...] = "") -> list[RequestError]:
    """Values that are missing, or that their option doesn't accept, whatever the others are."""
    problems: list[RequestError] = []
    for option in OPTIONS.values():
        if option.name.startswith(prefixes):
            with RequestError.collected(problems):
                option.check(option.value_in(config))
            if option.required and not option.value_in(config):
                problems.append(RequestError("missing", needed=option.help, where=option.spelling))
    return problems


def _margin(config: RunConfig) -> Iterator[RequestError]:
    """A time limit that leaves no time to train."""
    limit, margin = config.training.time_limit, config.training.time_margin
    try:
        if limit is None or parse_duration(margin) < parse_duration(limit):
            return
    except ValueError:
        return  # reported with the values
    yield RequestError(
        f"{limit} leaves no time to train before its margin of {margin}",
        needed="more than --time_margin",
        where="--time_limit",
    )


def _launch(config: RunConfig) -> Iterator[RequestError]:
    """Launch settings that can't take effect together."""
    launch = config.launch
    if secret := [name for name in launch.environment if is_secret(name)]:
        yield RequestError(
            f"{', '.join(secret)}: it would be written to files and command lines",
            action="export it before the start: tokens of your environment reach the job by a file only you can read",
            where="--env",
        )
    if launch.container_runtime == "pyxis" and launch.executor != "slurm":
        where = f"--container_runtime with {launch.executor}"
        yield RequestError("pyxis is a part of Slurm", needed="apptainer or none", where=where)
    if not launch.is_scheduled:
        for name in ("chain", "requeue", "modules", "setup"):
            option = OPTIONS[f"launch.{name}"]
            if option.value_in(config) != option.default:
                yield RequestError(
                    "no effect without a scheduler",
                    needed="--executor slurm, pbs or sge",
                    action="" if option.flag else "load or run them before the start",
                    where=option.spelling,
                )
        return
    if launch.chain > 1 and launch.requeue:
        yield RequestError("both ask for further jobs", needed="--chain or --requeue", where="--chain")
    if (launch.chain > 1 or launch.requeue) and not config.training.time_limit:
        yield RequestError(
            "missing",
            needed="the job's time limit: without it the run can't save before the job is killed",
            where="--time_limit",
        )
    launchers = {"slurm": (), "pbs": ("ssh", "pbsdsh", "mpirun"), "sge": ("ssh", "qrsh", "mpirun")}[launch.executor]
    if launchers and launch.node_launcher not in launchers:
        yield RequestError(
            f"{launch.node_launcher} with {launch.executor}",
            needed=" or ".join(launchers),
            where="launch.node_launcher",
        )


def _machine(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    launch, machine = config.launch, facts.machine
    if launch.executor != "local":
        return
    if launch.num_nodes != 1:
        yield RequestError(
            f"{launch.num_nodes} nodes with --executor local", needed="1: this machine", where="--num_nodes"
        )
    if machine.shared_memory_bytes is not None:
        yield from shared_memory_problems(config, machine.shared_memory_bytes)
    if resolve.accelerator(config, machine) != "gpu":
        return
    if not machine.torch_has_cuda:
        yield RequestError(
            "the installed torch can't use GPUs (a CPU build)",
            action="install a CUDA build of torch, or use --accelerator cpu",
            where="--accelerator",
        )
    elif launch.num_gpus > machine.num_gpus:
        offer = f"--num_gpus {machine.num_gpus}, or " if machine.num_gpus else ""
        yield RequestError(
            f"{launch.num_gpus} GPUs requested, {machine.num_gpus} found",
            needed="at most as many as CUDA shows to this process",
            action=f"use {offer}--accelerator cpu, and check CUDA_VISIBLE_DEVICES",
            where="--num_gpus",
        )


def shared_memory_problems(config: RunConfig, free_bytes: int) -> Iterator[RequestError]:
    """The problem of a node whose /dev/shm has less free than its ranks take at most: semaphores, and batches ahead."""
    num_ranks = config.launch.num_gpus
    num_workers = config.data.num_workers * (2 if config.training.val_interval else 1)
    batch_bytes = config.training.micro_batch_size * config.data.sequence_length * _BYTES_PER_TOKEN
    of_workers = num_workers * (_WORKER_SEMAPHORE_BYTES + _BATCHES_AHEAD * batch_bytes)
    needed_bytes = num_ranks * (SEMAPHORE_BYTES + of_workers)
    if free_bytes < needed_bytes:
        yield RequestError(
            f"{format_bytes(free_bytes)} of shared memory can be used in /dev/shm",
            needed=f"{format_bytes(needed_bytes)} for {num_ranks} ranks, their data loaders and their saves",
            action="give the container more (Docker: --ipc=host or --shm-size), or have /dev/shm mounted",
            where="this machine",
        )


def _schedule(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    optimizer = config.optimizer
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        yield RequestError(f"{optimizer.min_lr}", needed=f"at most --lr {optimizer.lr}", where="--min_lr")
    steps = resolve.max_steps(config, facts.split_tokens or ())
    decay, warmup = optimizer.lr_decay_steps or steps, optimizer.lr_warmup_steps or 0
    begin = optimizer.lr_rewarm_step or 0
    if not decay:
        return
    if begin >= decay:
        yield RequestError(
            f"the schedule starts again at step {begin}, but the decay ends at step {decay}",
            needed=f"less than {decay}",
            action="increase --max_steps (or --lr_decay_steps) by the steps that are to follow",
            where="--lr_rewarm_step",
        )
    elif warmup and begin + warmup >= decay:
        yield RequestError(
            f"{warmup} warmup steps{f' from step {begin}' if begin else ''}, but the decay ends at step {decay}",
            needed=f"less than {decay - begin}",
            action="shorten the warmup, or increase --lr_decay_steps or --max_steps",
            where="--lr_warmup_steps",
        )
    elif optimizer.lr_schedule in resolve.COOLDOWN_SCHEDULES:
        cooldown, longest = cooldown_steps(optimizer.lr_cooldown, decay - begin), decay - begin - warmup
        if cooldown > longest:
            yield RequestError(
                f"a decay of {cooldown} steps after {warmup} warmup steps in a schedule of {decay - begin}",
                needed=f"at most {longest} steps",
                where="--lr_cooldown",
            )


def _start_parity(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    has_reference = facts.initial_weights and facts.initial_weights.hf_weights
    if config.training.start_parity != "require" or has_reference or (config.nemo_model and not facts.hf_folder):
        return
    yield RequestError(
        "require, but the Hugging Face weights that the checkpoint was converted from are not available"
        if config.nemo_model
        else "require, for a run from random weights",
        needed="--nemo_model with a Hugging Face folder, or with a checkpoint that convert_checkpoint.py made from the "
        "folder that --hf_model_id names",
        where="--start_parity",
    )


def _batch(config: RunConfig) -> Iterator[RequestError]:
    ranks, model_parallel = resolve.world_size(config), config.parallel.model_parallel_size
    if ranks % model_parallel:
        parallel = config.parallel
        yield RequestError(
            f"{ranks} ranks ({config.launch.num_nodes} nodes x {config.launch.num_gpus}) are not divisible by "
            f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x "
            f"CP {parallel.context_parallel_size} = {model_parallel}",
            needed=f"a multiple of {model_parallel} ranks",
            action=f"use {_nearest(ranks, model_parallel)} ranks, or change -T, -P or -C",
            where="--num_gpus",
        )
        return
    training, data_parallel = config.training, ranks // model_parallel
    unit = training.micro_batch_size * data_parallel
    if training.global_batch_size % unit:
        yield RequestError(
            f"{training.global_batch_size} is not a multiple of micro batch size {training.micro_batch_size} x "
            f"data-parallel size {data_parallel} = {unit}",
            needed=f"a multiple of {unit}",
            action=f"use {_nearest(training.global_batch_size, unit)}",
            where="--global_batch_size",
        )
    elif training.rampup_batch_size:
        start, increment, _ = parse_rampup(training.rampup_batch_size)
        if start >= training.global_batch_size or (training.global_batch_size - start) % increment:
            yield RequestError(
                f"from {start} by {increment} doesn't lead to {training.global_batch_size}",
                needed="a START below --global_batch_size, and a difference that is a multiple of INCREMENT",
                where="--rampup_batch_size",
            )
        elif start % unit or increment % unit:
            yield RequestError(
                f"{start} or {increment} is not a multiple of micro batch size {training.micro_batch_size} x "
                f"data-parallel size {data_parallel} = {unit}",
                needed=f"multiples of {unit}",
                where="--rampup_batch_size",
            )


def _model(config: RunConfig, model: ModelShape) -> Iterator[RequestError]:
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    yield from _experts(config, model)
    for count, what, size, flag in (
        (model.num_attention_heads, "attention heads", tensor, "--tensor_model_parallel_size"),
        (model.num_query_groups, "key/value heads", tensor, "--tensor_model_parallel_size"),
        (
            model.features.global_attention.num_query_groups if model.features.global_attention else 0,
            "key/value heads of layers without a window",
            tensor,
            "--tensor_model_parallel_size",
        ),
        (model.ffn_hidden_size if model.has_dense_layers else 0, "MLP rows", tensor, "--tensor_model_parallel_size"),
        (
            model.features.delta_net.num_key_heads if model.features.delta_net else 0,
            "key heads of gated delta nets",
            tensor,
            "--tensor_model_parallel_size",
        ),
        (
            model.shared_expert_ffn_hidden_size,
            "rows of the shared expert",
            tensor,
            "--tensor_model_parallel_size",
        ),
        (model.num_experts, "experts", config.parallel.expert_model_parallel_size, "--expert_model_parallel_size"),
        (
            model.expert_ffn_hidden_size,
            "rows of an expert",
            config.parallel.expert_tensor_parallel,
            "--expert_tensor_parallel_size",
        ),
        (model.num_layers, "layers", pipeline, "--pipeline_model_parallel_size"),
    ):
        if count % size:
            divisors = [str(divisor) for divisor in range(1, min(count, 64) + 1) if count % divisor == 0]
            yield RequestError(
                f"{count} {what} of the model are not divisible by {size}",
                needed=f"a divisor of {count}: {', '.join(divisors)}",
                where=flag,
            )
    layers, training = model.num_layers // pipeline, config.training
    if training.recompute_layers and (training.recompute != "full" or training.recompute_layers > layers):
        yield RequestError(
            f"{training.recompute_layers} layers with --recompute {training.recompute}",
            needed=f"--recompute full, and at most the {layers} layers of a pipeline stage",
            where="--recompute_layers",
        )


def _experts(config: RunConfig, model: ModelShape) -> Iterator[RequestError]:
    """What doesn't fit a model with experts, or without."""
    parallel = config.parallel
    expert, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel
    routing = model.features.routing
    if config.training.router_bias_update_rate is not None and not (routing and routing.expert_bias):
        yield RequestError(
            f"the routers have no biases that training moves ({model.family})",
            needed="leave it out",
            action="--router_aux_loss_coef balances the load of their experts",
            where="--router_bias_update_rate",
        )
    if not model.num_experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(parallel, name) or 1) > 1:
                yield RequestError("the model has no experts", needed="1, or leave it out", where=f"--{name}")
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(config.training, name):
                yield RequestError("the model has no experts", needed="0, or leave it out", where=f"--{name}")
        return
    unit, ranks = parallel.pipeline_model_parallel_size * expert * expert_tensor, resolve.world_size(config)
    if ranks % unit:
        yield RequestError(
            f"{ranks} ranks are not divisible by PP {parallel.pipeline_model_parallel_size} x EP {expert} x "
            f"ETP {expert_tensor} = {unit}",
            needed=f"a multiple of {unit} ranks: EP and ETP share out the ranks that TP, CP and DP do",
            where="--expert_model_parallel_size",
        )
    if parallel.tensor_model_parallel_size > 1 and not resolve.sequence_parallel(config):
        yield RequestError(
            "off, for a model with experts", needed="true: Megatron requires it", where="parallel.sequence_parallel"
        )
    if config.training.recompute == "selective":
        yield RequestError(
            "selective, for a model with experts", needed="none, full or auto: MLPs are recomputed", where="--recompute"
        )


def _sequence_length(config: RunConfig, model: ModelShape) -> Iterator[RequestError]:
    length, context = config.data.sequence_length, config.parallel.context_parallel_size
    if length > model.max_position_embeddings:
        yield RequestError(
            f"{length} tokens, but the model's context length is {model.max_position_embeddings}",
            needed=f"at most max_position_embeddings = {model.max_position_embeddings}",
            action="shorten it; to extend the context from trained weights: --rope_scaling, with a factor that reaches "
            "so far, or --rope_theta",
            where="--sequence_length",
        )
    unit, reason = (2 * context if context > 1 else 1), "2*CP (load-balanced CP split)"
    if resolve.sequence_parallel(config):
        unit = math.lcm(unit, context * config.parallel.tensor_model_parallel_size)
        reason = "2*CP and CP*TP (sequence parallel)"
    if length % unit:
        yield RequestError(
            f"{length} is not divisible by {unit}",
            needed=f"a multiple of {reason}",
            action=f"use {_nearest(length, unit)}",
            where="--sequence_length",
        )


def _fp8(config: RunConfig, model: ModelShape, machine: MachineFacts) -> Iterator[RequestError]:
    training, tensor = config.training, config.parallel.tensor_model_parallel_size
    where = "--precision fp8"
    if resolve.accelerator(config, machine) == "cpu" and not training.fp8_emulation:
        yield RequestError(
            "CPUs have no FP8 products",
            needed="a GPU that has them (Ada, Hopper, Blackwell), or --precision bf16 or fp32",
            action="to try what FP8 does to a small model, --set training.fp8_emulation=true computes them in fp32",
            where=where,
        )
    if training.layer_spec == "te":
        yield RequestError(
            "Transformer Engine's layers",
            needed="--layer_spec auto or torch",
            where="--layer_spec with --precision fp8",
        )
    if 2 * training.fp8_first_last_bf16 >= model.num_layers:
        yield RequestError(
            f"{training.fp8_first_last_bf16} layers at each end of {model.num_layers} stay in bf16",
            needed="at least one layer in FP8",
            where="--fp8_first_last_bf16",
        )
    qkv = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim
    tokens = training.micro_batch_size * config.data.sequence_length // config.parallel.context_parallel_size
    expert_ffn = model.expert_ffn_hidden_size // config.parallel.expert_tensor_parallel if model.num_experts else 0
    for size, what in (
        (model.hidden_size, "the hidden size"),
        (qkv // tensor, "the query, key and value rows of a rank"),
        (model.num_attention_heads * model.head_dim // tensor, "the attention heads' size on a rank"),
        (model.ffn_hidden_size // tensor if model.has_dense_layers else 0, "the MLP's size on a rank"),
        (expert_ffn, "an expert's size on a rank"),
        (tokens, "the tokens of a microbatch on a rank"),
    ):
        if size % FP8_MULTIPLE:
            needed = f"multiples of {FP8_MULTIPLE}: FP8 products have no other sizes"
            yield RequestError(f"{what}: {size}", needed=needed, where=where)


def _nearest(number: int, unit: int) -> str:
    """The multiples of `unit` around a number, as an offer: '8 or 16'."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
