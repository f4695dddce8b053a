"""Everything about a request that can be found wrong without a GPU, each with what was found, needed and to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.field_checks import choices, durations, flag_of, ranges, ranges_of
from pretrainkit.config.fields import value_of
from pretrainkit.config.flags import FLAGS
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import ModelShape, RunConfig
from pretrainkit.config.split import parse_split
from pretrainkit.config.validate_data import data_problems
from pretrainkit.errors import RequestError


def problems_of(config: RunConfig, facts: RunFacts) -> list[RequestError]:
    """Every problem of a request. Checks that need a value already found wrong, or an unknown fact, are left out."""
    values = [*choices(config), *ranges(config), *_names(config)]
    if values:
        return values
    return [
        *_executor(config),
        *_machine(config, facts),
        *_batch(config),
        *_optimizer(config, facts),
        *(_model(config, facts.model) if facts.model else ()),
        *data_problems(config, facts),
        *_start(config, facts),
    ]


def _start(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    if config.training.start_parity != "require" or facts.hf_weights or (config.nemo_model and not facts.hf_folder):
        return
    yield RequestError(
        "require, but the Hugging Face weights that the checkpoint was made from are not at hand"
        if config.nemo_model
        else "require, for a run from random weights",
        needed="--nemo_model with a Hugging Face folder, or with a checkpoint that convert_checkpoint.py made from the "
        "folder that --hf_model_id names",
        where="--start_parity",
    )


def problems_of_launch(config: RunConfig) -> list[RequestError]:
    """The problems of where and how something is to run, for commands that have nothing else of a run."""
    return [*choices(config, "launch."), *ranges_of(config, "launch."), *durations(config), *_executor(config)]


def _executor(config: RunConfig) -> Iterator[RequestError]:
    """Settings of launching that can't take effect together."""
    launch = config.launch
    if not launch.is_scheduled:
        for name in ("chain", "requeue"):
            if value_of(config, f"launch.{name}") not in (1, False):
                yield RequestError(
                    "no effect without a scheduler", needed="--executor slurm, pbs or sge", where=f"--{name}"
                )
        for name in ("modules", "setup"):
            if value_of(config, f"launch.{name}"):
                yield RequestError(
                    "no effect without a scheduler", action="load or run them before the start", where=f"launch.{name}"
                )
        if launch.container_runtime == "pyxis":
            yield RequestError("pyxis is a part of Slurm", needed="apptainer or none", where="--container_runtime")
        return
    if launch.chain > 1 and launch.requeue:
        yield RequestError("both ask for further jobs", needed="--chain or --requeue", where="--chain")
    if (launch.chain > 1 or launch.requeue) and not config.training.time_limit:
        yield RequestError(
            "missing",
            needed="the job's time: without it a run can't save before its time is over",
            where="--time_limit",
        )
    starters = {"slurm": (), "pbs": ("ssh", "pbsdsh", "mpirun"), "sge": ("ssh", "qrsh", "mpirun")}[launch.executor]
    if starters and launch.node_launcher not in starters:
        yield RequestError(
            f"{launch.node_launcher} with {launch.executor}", needed=" or ".join(starters), where="node_launcher"
        )


def _names(config: RunConfig) -> Iterator[RequestError]:
    for flag in FLAGS:
        if flag.required and not value_of(config, flag.field):
            yield RequestError("missing", needed=flag.help, where=flag.name)
    experiment = config.experiment
    if not experiment or experiment.startswith(".") or "/" in experiment or not experiment.isprintable():
        yield RequestError(
            f"{experiment!r}", needed="a folder name: no '/', no '.' in front, not empty", where="--experiment"
        )
    try:
        parse_split(config.data.split)
    except RequestError as problem:
        yield problem


def _machine(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    launch, machine = config.launch, facts.machine
    if launch.executor != "local":
        return
    if launch.num_nodes != 1:
        yield RequestError(
            f"{launch.num_nodes} nodes with --executor local", needed="1: this machine", where="--num_nodes"
        )
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
            f"{launch.num_gpus} GPUs asked for, {machine.num_gpus} here",
            needed="at most as many as CUDA shows to this process",
            action=f"use {offer}--accelerator cpu, and look at CUDA_VISIBLE_DEVICES",
            where="--num_gpus",
        )


def _batch(config: RunConfig) -> Iterator[RequestError]:
    ranks, model_parallel = resolve.world_size(config), resolve.model_parallel_size(config)
    if ranks % model_parallel:
        parallel = config.parallel
        below = ranks // model_parallel * model_parallel
        offers = [str(count) for count in (below, below + model_parallel) if count]
        yield RequestError(
            f"{ranks} ranks ({config.launch.num_nodes} nodes x {config.launch.num_gpus}) don't divide by "
            f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x "
            f"CP {parallel.context_parallel_size} = {model_parallel}",
            needed=f"a multiple of {model_parallel} ranks",
            action=f"use {' or '.join(offers)} ranks, or change -T, -P or -C",
            where="--num_gpus",
        )
        return
    training, copies = config.training, ranks // model_parallel
    unit = training.micro_batch_size * copies
    if training.global_batch_size % unit:
        below = training.global_batch_size // unit * unit
        offers = [str(size) for size in (below, below + unit) if size]
        yield RequestError(
            f"{training.global_batch_size} is no multiple of micro batch size {training.micro_batch_size} x "
            f"data-parallel size {copies} = {unit}",
            needed=f"a multiple of {unit}",
            action=f"use {' or '.join(offers)}",
            where="--global_batch_size",
        )


def _optimizer(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    optimizer = config.optimizer
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        yield RequestError(
            f"{optimizer.min_lr}", needed=f"at most --lr {optimizer.lr}", where=flag_of("optimizer.min_lr")
        )
    steps = resolve.max_steps(config, facts.split_tokens or ())
    decay, warmup = resolve.lr_decay_steps(config, steps), optimizer.lr_warmup_steps
    if warmup and decay and warmup >= decay:
        yield RequestError(
            f"{warmup} steps of warm-up, but the decay ends at step {decay}",
            needed=f"less than {decay}",
            action="shorten the warm-up, or lengthen --lr_decay_steps or --max_steps",
            where="--lr_warmup_steps",
        )


def _model(config: RunConfig, shape: ModelShape) -> Iterator[RequestError]:
    parallel, length = config.parallel, config.data.sequence_length
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if shape.num_experts:
        yield RequestError(
            f"a model with {shape.num_experts} experts a layer ({shape.family})",
            needed="a dense model: training with experts is not there yet, only their conversion",
            where="--hf_model_id",
        )
    for count, what in (
        (shape.num_attention_heads, "attention heads"),
        (shape.num_query_groups, "key/value heads"),
        (shape.ffn_hidden_size, "MLP rows"),
    ):
        if count % tensor:
            yield _indivisible(count, what, tensor, flag_of("parallel.tensor_model_parallel_size"))
    if shape.num_layers % parallel.pipeline_model_parallel_size:
        yield _indivisible(
            shape.num_layers,
            "layers",
            parallel.pipeline_model_parallel_size,
            flag_of("parallel.pipeline_model_parallel_size"),
        )
    layers, training = shape.num_layers // parallel.pipeline_model_parallel_size, config.training
    if training.recompute_layers and (training.recompute != "full" or training.recompute_layers > layers):
        yield RequestError(
            f"{training.recompute_layers} layers with --recompute {training.recompute}",
            needed=f"--recompute full, and at most the {layers} layers of a pipeline stage",
            where="--recompute_layers",
        )
    if length > shape.max_position_embeddings:
        yield RequestError(
            f"{length} tokens, but the model was made for {shape.max_position_embeddings}",
            needed=f"at most max_position_embeddings = {shape.max_position_embeddings}",
            action="shorten it; to extend the context, change max_position_embeddings and the rope settings "
            "in the model's config.json, so that the trained model says what it can do",
            where="--sequence_length",
        )
    parts = (2 * context if context > 1 else 1, "2 x CP, as each rank takes two pieces")
    if resolve.sequence_parallel(config):
        parts = (math.lcm(parts[0], context * tensor), "2 x CP and CP x TP (sequence parallel)")
    if length % parts[0]:
        below = length // parts[0] * parts[0]
        offers = [str(offer) for offer in (below, below + parts[0]) if offer]
        yield RequestError(
            f"{length} doesn't divide by {parts[0]}",
            needed=f"a multiple of {parts[1]}",
            action=f"use {' or '.join(offers)}",
            where="--sequence_length",
        )


def _indivisible(count: int, what: str, ranks: int, flag: str) -> RequestError:
    fitting = [str(divisor) for divisor in range(1, count + 1) if count % divisor == 0 and divisor <= 64]
    return RequestError(
        f"{count} {what} of the model don't divide by {ranks}",
        needed=f"a divisor of {count}: {', '.join(fitting)}",
        where=flag,
    )
