"""Whether ranks, batch, TP, PP, CP and sequence length fit each other and the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.schema import ModelShape, RunConfig
from pretrainkit.errors import RequestError


def parallel_problems(config: RunConfig, model: ModelShape | None) -> Iterator[RequestError]:
    """Sizes that don't divide, and what the model can't do; the model is not checked where it is unknown."""
    yield from _batch(config)
    if model:
        yield from _model(config, model)
        yield from _sequence_length(config, model)


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


def _model(config: RunConfig, model: ModelShape) -> Iterator[RequestError]:
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    if model.num_experts:
        yield RequestError(
            f"a model with {model.num_experts} experts per layer ({model.family})",
            needed="a dense model: MoE training is not supported yet (conversion only)",
            where="--hf_model_id",
        )
    for count, what, size, flag in (
        (model.num_attention_heads, "attention heads", tensor, "--tensor_model_parallel_size"),
        (model.num_query_groups, "key/value heads", tensor, "--tensor_model_parallel_size"),
        (model.ffn_hidden_size, "MLP rows", tensor, "--tensor_model_parallel_size"),
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


def _sequence_length(config: RunConfig, model: ModelShape) -> Iterator[RequestError]:
    length, context = config.data.sequence_length, config.parallel.context_parallel_size
    if length > model.max_position_embeddings:
        yield RequestError(
            f"{length} tokens, but the model's context length is {model.max_position_embeddings}",
            needed=f"at most max_position_embeddings = {model.max_position_embeddings}",
            action="shorten it; to extend the context, change max_position_embeddings and the rope settings in the "
            "model's config.json, so that the trained model states its real context length",
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


def _nearest(number: int, unit: int) -> str:
    """The multiples of `unit` around a number, as an offer: '8 or 16'."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
