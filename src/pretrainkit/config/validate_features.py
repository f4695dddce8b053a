"""What a request can't have with the features of a model's layers (`config.layer_features`)."""

from __future__ import annotations

from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import ModelShape, RunConfig
from pretrainkit.errors import RequestError


def feature_problems(config: RunConfig, model: ModelShape, facts: RunFacts) -> Iterator[RequestError]:
    """What doesn't go with the features of a model's layers."""
    length, training, features = config.data.sequence_length, config.training, model.features
    if training.layer_spec == "te" and model.needs_our_layers:
        rotary = f"{model.rope_scaling.kind} scaling" if model.rope_scaling else ""
        found = f"a model with {features.names() or rotary} ({model.family})"
        yield RequestError(found, needed="--layer_spec auto or torch", where="--layer_spec te")
    scaling = model.rope_scaling
    if scaling and scaling.kind == "longrope" and scaling.original_max_position_embeddings < length:
        longest = scaling.original_max_position_embeddings
        if facts.dataset and resolve.reset_attention_mask(config, facts.dataset):
            yield RequestError(
                f"longrope ({model.family}) in sequences of {length} tokens, whose documents may be shorter",
                needed=f"false, or sequences of up to {longest} tokens: transformers chooses the rotary frequencies of "
                "a document by its length",
                where="data.reset_attention_mask",
            )
    if not (names := features.names(length)):
        return
    found = f"a model with {names} ({model.family})"
    if training.precision == "fp8":
        yield RequestError(found, needed="--precision bf16 or fp32", where="--precision fp8")
    on_gpu = resolve.accelerator(config, facts.machine) != "cpu"
    if 0 < features.attention_chunk < length and facts.dataset and resolve.reset_attention_mask(config, facts.dataset):
        needed = f"false, or sequences of up to {features.attention_chunk} tokens: chunks are not those of documents"
        yield RequestError(found, needed=needed, where="data.reset_attention_mask")
    if features.delta_net:
        yield from _delta_net_problems(config, facts, found)
    elif config.parallel.context_parallel_size > 1 and on_gpu:
        yield RequestError(
            found,
            needed="1, or --accelerator cpu: context parallelism with these was not tried on GPUs yet",
            where="--context_parallel_size",
        )


def _delta_net_problems(config: RunConfig, facts: RunFacts, found: str) -> Iterator[RequestError]:
    needed = "whole sequences: a gated delta net's state runs through them"
    if config.parallel.context_parallel_size > 1:
        yield RequestError(found, needed=f"1, {needed}", where="--context_parallel_size")
    if facts.dataset and resolve.reset_attention_mask(config, facts.dataset):
        yield RequestError(found, needed=f"false, {needed}", where="data.reset_attention_mask")
