"""What a single value of a request may be, whatever the model, the data and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretrainkit.config.fields import FIELDS, closest, value_of
from pretrainkit.config.flags import FLAGS
from pretrainkit.config.launch import EXECUTORS
from pretrainkit.config.schema import RunConfig
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
FUSED_KERNELS = ("norm", "rotary", "swiglu", "cross_entropy", "weight_gradient", "exchange", "launches")
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


def flag_of(dotted: str) -> str:
    """How a user names a field: its flag, or its dotted name where it has none."""
    return next((flag.name for flag in FLAGS if flag.field == dotted), dotted)


def choices(config: RunConfig, prefix: str = "") -> Iterator[RequestError]:
    """Words that a field, whose name begins with `prefix`, doesn't know."""
    for dotted, words in CHOICES.items():
        if not dotted.startswith(prefix):
            continue
        value = value_of(config, dotted)
        if value not in words:
            suggestion = closest(value, words)
            yield RequestError(
                f"unknown value {value!r}",
                needed=" or ".join(words),
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


def ranges_of(config: RunConfig, prefix: str = "") -> Iterator[RequestError]:
    """Numbers out of the range of their field, whose name begins with `prefix`."""
    for dotted, needed in _RANGES.items():
        value = value_of(config, dotted)
        if value is None or not dotted.startswith(prefix):
            continue
        if not math.isfinite(value) or value < 0 or (needed == _POSITIVE and value == 0):
            yield RequestError(f"{value}", needed=f"{FIELDS[dotted].type.__name__} {needed}", where=flag_of(dotted))


def ranges(config: RunConfig) -> Iterator[RequestError]:
    """All numbers and durations that are out of their range."""
    yield from ranges_of(config)
    for dotted in ("optimizer.adam_beta1", "optimizer.adam_beta2"):
        if value_of(config, dotted) >= 1:
            yield RequestError(f"{value_of(config, dotted)}", needed="below 1", where=dotted)
    yield from durations(config)
    spike = config.training.max_loss_spike
    if spike is not None and not spike > 1:
        yield RequestError(f"{spike}", needed="above 1, a multiple of the mean loss", where="--max_loss_spike")
    if config.training.seed > MAX_SEED:
        yield RequestError(f"{config.training.seed}", needed=f"at most {MAX_SEED}", where="--seed")


def durations(config: RunConfig) -> Iterator[RequestError]:
    """Times that can't be read, or that leave none to train in."""
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
