"""Everything about a request that can be found wrong without a GPU, each with what was found, needed and to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.fields import FIELDS, closest, value_of
from pretrainkit.config.flags import FLAGS
from pretrainkit.config.launch import EXECUTORS
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import DatasetFacts, ModelShape, RunConfig
from pretrainkit.config.split import SPLIT_NAMES, num_samples, parse_split
from pretrainkit.errors import RequestError
from pretrainkit.units import parse_duration

CHOICES: dict[str, tuple[str, ...]] = {
    "launch.executor": EXECUTORS,
    "launch.container_runtime": ("auto", "pyxis", "apptainer", "none"),
    "launch.node_launcher": ("ssh", "pbsdsh", "qrsh", "mpirun"),
    "launch.accelerator": ("auto", "cpu", "gpu"),
    "training.precision": ("auto", "bf16", "fp32"),
    "training.layer_spec": ("auto", "te", "torch"),
    "training.on_bad_loss": ("stop", "skip"),
    "training.start_parity": ("auto", "off", "require"),
    "training.async_save": ("auto", "on", "off"),
    "training.recompute": ("auto", "none", "selective", "full"),
    "optimizer.lr_schedule": ("cosine", "linear", "constant"),
}
"""Fields that take one of a few words."""
FUSED_KERNELS = ("norm", "rotary", "swiglu", "cross_entropy", "weight_gradient")
"""Parts of a layer that --fused_kernels may name."""
MAX_SEED = 2**32 - 1
"""Largest seed that numpy's RandomState, which orders Megatron's samples, takes."""

_POSITIVE = "above 0"
_NOT_NEGATIVE = "0 or more"
_RANGES: dict[str, str] = {
    "launch.num_nodes": _POSITIVE,
    "launch.num_gpus": _POSITIVE,
    "launch.cpus_per_task": _POSITIVE,
    "launch.slots_per_gpu": _POSITIVE,
    "launch.chain": _POSITIVE,
    "parallel.tensor_model_parallel_size": _POSITIVE,
    "parallel.pipeline_model_parallel_size": _POSITIVE,
    "parallel.context_parallel_size": _POSITIVE,
    "data.sequence_length": _POSITIVE,
    "data.num_workers": _NOT_NEGATIVE,
    "training.max_steps": _POSITIVE,
    "training.global_batch_size": _POSITIVE,
    "training.micro_batch_size": _POSITIVE,
    "training.save_interval": _POSITIVE,
    "training.keep_last": _POSITIVE,
    "training.keep_every": _POSITIVE,
    "training.keep_optimizer_last": _POSITIVE,
    "training.save_retries": _NOT_NEGATIVE,
    "training.max_missed_saves": _NOT_NEGATIVE,
    "training.recompute_layers": _POSITIVE,
    "launch.gpu_memory_gib": _POSITIVE,
    "training.val_interval": _NOT_NEGATIVE,
    "training.val_steps": _POSITIVE,
    "training.log_interval": _POSITIVE,
    "training.seed": _NOT_NEGATIVE,
    "training.restart_limit": _NOT_NEGATIVE,
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr": _NOT_NEGATIVE,
    "optimizer.lr_warmup_steps": _NOT_NEGATIVE,
    "optimizer.lr_decay_steps": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.adam_beta1": _NOT_NEGATIVE,
    "optimizer.adam_beta2": _NOT_NEGATIVE,
    "optimizer.adam_eps": _POSITIVE,
    "optimizer.clip_grad": _NOT_NEGATIVE,
}


def problems_of(config: RunConfig, facts: RunFacts) -> list[RequestError]:
    """Every problem of a request. Checks that need a value already found wrong, or an unknown fact, are left out."""
    values = [*_choices(config), *_ranges(config), *_names(config)]
    if values:
        return values
    return [
        *_executor(config),
        *_machine(config, facts),
        *_batch(config),
        *_optimizer(config, facts),
        *(_model(config, facts.model) if facts.model else ()),
        *_data(config, facts),
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
    return [*_choices(config, "launch."), *_ranges_of(config, "launch."), *_durations(config), *_executor(config)]


def flag_of(dotted: str) -> str:
    """How a user names a field: its flag, or its dotted name where it has none."""
    return next((flag.name for flag in FLAGS if flag.field == dotted), dotted)


def _choices(config: RunConfig, prefix: str = "") -> Iterator[RequestError]:
    for dotted, choices in CHOICES.items():
        if not dotted.startswith(prefix):
            continue
        value = value_of(config, dotted)
        if value not in choices:
            suggestion = closest(value, choices)
            yield RequestError(
                f"unknown value {value!r}",
                needed=" or ".join(choices),
                action=f"did you mean {suggestion}?" if suggestion else "",
                where=flag_of(dotted),
            )
    kernels = config.training.fused_kernels
    for name in () if kernels in ("auto", "off") else kernels.split(","):
        if name not in FUSED_KERNELS:
            yield RequestError(
                f"unknown kernel {name!r}",
                needed=f"auto, off, or some of {', '.join(FUSED_KERNELS)} with commas between",
                where="--fused_kernels",
            )


def _ranges_of(config: RunConfig, prefix: str = "") -> Iterator[RequestError]:
    for dotted, needed in _RANGES.items():
        value = value_of(config, dotted)
        if value is None or not dotted.startswith(prefix):
            continue
        if not math.isfinite(value) or value < 0 or (needed == _POSITIVE and value == 0):
            yield RequestError(f"{value}", needed=f"{FIELDS[dotted].type.__name__} {needed}", where=flag_of(dotted))


def _ranges(config: RunConfig) -> Iterator[RequestError]:
    yield from _ranges_of(config)
    for dotted in ("optimizer.adam_beta1", "optimizer.adam_beta2"):
        if value_of(config, dotted) >= 1:
            yield RequestError(f"{value_of(config, dotted)}", needed="below 1", where=dotted)
    yield from _durations(config)
    spike = config.training.max_loss_spike
    if spike is not None and not spike > 1:
        yield RequestError(f"{spike}", needed="above 1, a multiple of the mean loss", where="--max_loss_spike")
    if config.training.seed > MAX_SEED:
        yield RequestError(f"{config.training.seed}", needed=f"at most {MAX_SEED}", where="--seed")


def _durations(config: RunConfig) -> Iterator[RequestError]:
    seconds = {}
    for name in ("time_limit", "time_margin", "save_timeout"):
        text = getattr(config.training, name)
        try:
            seconds[name] = parse_duration(text) if text else math.inf
        except ValueError as error:
            yield RequestError(str(error), needed="[D-]HH:MM:SS", where=f"--{name}")
    if seconds.get("time_margin", 0) >= seconds.get("time_limit", math.inf):
        yield RequestError(
            f"{config.training.time_limit} leaves no time to train before its margin of {config.training.time_margin}",
            needed="more than --time_margin",
            where="--time_limit",
        )


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


def _data(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    dataset, model = facts.dataset, facts.model
    if model:
        for owner, flag, largest_id in (
            ("the data's tokenizer", "--dataset_path", dataset.max_token_id if dataset else None),
            ("the tokenizer", "--hf_model_id", facts.tokenizer_largest_id),
        ):
            if largest_id is not None and largest_id >= model.vocab_size:
                yield RequestError(
                    f"{owner} gives ids up to {largest_id}, the model has {model.vocab_size} rows",
                    needed="a row for every id",
                    action="use the tokenizer that belongs to the model, or enlarge the model's embedding",
                    where=flag,
                )
    if dataset is None:
        return
    if facts.tokenizer_sha256:
        others = [
            prefix
            for prefix, sha256 in zip(dataset.prefixes, facts.dataset_tokenizers, strict=False)
            if sha256 and sha256 != facts.tokenizer_sha256
        ]
        if others:
            yield RequestError(
                f"made with another tokenizer than the model's: {', '.join(others)}",
                needed=f"data made with the tokenizer.json of {facts.hf_folder}",
                action="preprocess the data again with it",
                where="--dataset_path",
            )
    yield from _documents(config, dataset)
    if facts.split_tokens is not None:
        yield from _tokens(config, facts, facts.split_tokens)


def _documents(config: RunConfig, dataset: DatasetFacts) -> Iterator[RequestError]:
    length, row_length = config.data.sequence_length, dataset.row_length
    if row_length is not None and row_length != length:
        yield RequestError(
            f"{length} tokens, but the dataset was packed by bestfit into rows of {row_length}",
            needed=f"{row_length}: rows of whole documents are not cut",
            action=f"give --sequence_length {row_length}, or pack again with --sequence_length {length}",
            where="--sequence_length",
        )
    if config.training.layer_spec == "te" and resolve.reset_attention_mask(config, dataset):
        yield RequestError(
            "Transformer Engine's layers with attention within documents",
            needed="auto or torch",
            where="--layer_spec",
        )
    context = config.parallel.context_parallel_size
    if context > 1 and resolve.reset_attention_mask(config, dataset):
        why = "--reset_attention_mask" if config.data.reset_attention_mask else "a set packed by bestfit"
        yield RequestError(
            f"{why} with context parallel size {context}",
            needed="1: attention within documents is not there for sequences that are spread over ranks",
            action="use -T or -P instead" + (", or pack by concat" if dataset.row_length else ""),
            where="--context_parallel_size",
        )


def _tokens(
    config: RunConfig, facts: RunFacts, split_tokens: tuple[tuple[int, int, int], ...]
) -> Iterator[RequestError]:
    assert facts.dataset
    length = config.data.sequence_length
    shares = parse_split(config.data.split)
    used = [0, 1] if config.training.val_interval else [0]
    for split in used:
        name, too_short = SPLIT_NAMES[split], []
        for prefix, tokens in zip(facts.dataset.prefixes, split_tokens, strict=True):
            if num_samples(tokens[split], length) < 1:
                too_short.append(f"{prefix} has {tokens[split]} {name} tokens")
        if too_short:
            shown = "; ".join(too_short[:3]) + (f"; and {len(too_short) - 3} more" if too_short[3:] else "")
            yield RequestError(
                f"fewer tokens than one {name} sample: {shown}",
                needed=f"{length + 1} tokens (sequence length + 1) in the {name} documents of each prefix",
                action=_more_tokens(split, shares),
                where="--split" if split else "--dataset_path",
            )
            return
    samples = resolve.samples_per_epoch(config, split_tokens)
    if config.training.max_steps is None and samples < config.training.global_batch_size:
        yield RequestError(
            f"one epoch has {samples} samples, a step takes {config.training.global_batch_size}",
            needed="at least one step",
            action="take a smaller --global_batch_size or --sequence_length, or set --max_steps to repeat the data",
            where="--max_steps",
        )


def _more_tokens(split: int, shares: tuple[float, float, float]) -> str:
    if split == 0:
        return "take a shorter --sequence_length, or more text; join small files with tools/inspect_data.py merge"
    more = "give validation a larger share, such as --split 90,10,0" if shares[1] else "give validation a share"
    return f"{more}, or switch evaluation off with --val_interval 0"
