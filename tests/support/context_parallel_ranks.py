"""Attention over a sequence that lies on several ranks, against the whole sequence on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from pretrainkit.config.schema import ModelShape, Recompute
from pretrainkit.megatron import model as megatron_model
from pretrainkit.megatron.attention import attend_across_ranks
from pretrainkit.megatron.document_attention import attend_within_documents, segment_bounds
from pretrainkit.megatron.model import recompute_fields

BATCH, QUERY_HEADS = 2, 4
SCALE = 0.3
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def compare_on_cpu(rank: int, world_size: int) -> None:
    """Compare over gloo, in fp32."""
    distributed.init_process_group("gloo")
    for length in (2 * world_size, 30 * world_size):
        compare_with_one_rank(distributed.group.WORLD, length, 16, torch.float32, "cpu")
        compare_documents(distributed.group.WORLD, length, 16, torch.float32, "cpu")


def compare_with_one_rank(
    group: distributed.ProcessGroup, length: int, head_size: int, dtype: torch.dtype, device: str
) -> None:
    """Causal attention over whole sequences."""

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _heads_first(F.scaled_dot_product_attention, q, k, v, is_causal=True)

    _compare(lambda q, k, v: attend_across_ranks(q, k, v, group, SCALE), whole, group, length, head_size, dtype, device)


def compare_documents(
    group: distributed.ProcessGroup, length: int, head_size: int, dtype: torch.dtype, device: str
) -> None:
    """Causal attention within documents: two rows of documents of many lengths, one of which crosses all ranks."""
    rows = [[0, length // 5, length // 5 + 1, length // 2, length - 1], [0, length - length // 7 - 1]]
    documents = torch.stack([torch.bincount(torch.tensor(row), minlength=length).clamp(max=1) for row in rows])
    documents = documents.cumsum(1)  # [b, s]
    begins = documents.diff(dim=1, prepend=torch.zeros(BATCH, 1, dtype=torch.long)) > 0
    bounds = segment_bounds(torch.where(begins, 0, 1), group.rank(), group.size()).to(device)
    documents = documents.to(device)
    mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _heads_first(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)

    def by_segments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_within_documents(q, k, v, bounds, group, SCALE).unflatten(2, (QUERY_HEADS, head_size))

    _compare(by_segments, masked, group, length, head_size, dtype, device)


def count_kept(rank: int, world_size: int, *, output: Path) -> None:
    """Write the elements per token of this rank that are kept for the backward pass: by attention, and by each layer of
    a model that is recomputed.
    """
    distributed.init_process_group("gloo")
    megatron_model.parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    megatron_model.model_parallel_cuda_manual_seed(0)
    tokens, heads, groups, size = 64, 8, 2, 16
    query, key, value = (torch.randn(tokens, 1, each, size, requires_grad=True) for each in (heads, groups, groups))
    group = distributed.group.WORLD
    found = {"attention": _kept(lambda: attend_across_ranks(query, key, value, group)) / tokens}
    shape = ModelShape("llama", 2, 64, 128, 8, 2, 8, 320, 512, 1e4, 1e-5, tie_word_embeddings=True)
    of_layers = {}
    for layers in (2, 4):
        model = megatron_model.build_model(
            replace(shape, num_layers=layers), padded_vocab_size=384, sequence_length=tokens * world_size
        )
        fields = {"distribute_saved_activations": False, "context_parallel_size": world_size}
        for name, field in {**recompute_fields(Recompute("full", layers)), **fields}.items():
            setattr(model.config, name, field)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        of_layers[layers] = _kept(partial(model, ids, torch.arange(tokens)[None], None, labels=ids), model)
    found["recomputed layer"] = (of_layers[4] - of_layers[2]) / 2 / tokens
    if rank == 0:
        output.write_text(json.dumps(found))


def _kept(forward: Callable[[], Tensor], model: torch.nn.Module | None = None) -> float:
    """Elements in fp32 of the storages that are saved for the backward pass, without a model's parameters."""
    own = {each.untyped_storage().data_ptr() for each in (model.parameters() if model else ())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 4


def _heads_first(attend: Callable[..., Tensor], *parts: Tensor, **options: object) -> Tensor:
    q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
    return attend(q, k, v, **options, scale=SCALE, enable_gqa=True).permute(2, 0, 1, 3)


def _compare(
    attend: Attention,
    reference: Attention,
    group: distributed.ProcessGroup,
    length: int,
    head_size: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Output and gradients of this rank's tokens of sequences of `length`, against fp32 on whole sequences."""
    for key_heads in (1, 2, 4):
        _compare_heads(attend, reference, group, (length, BATCH, key_heads, head_size), dtype, device)


def _compare_heads(
    attend: Attention,
    reference: Attention,
    group: distributed.ProcessGroup,
    keys: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    length, batch, key_heads, head_size = keys
    generator = torch.Generator().manual_seed(length)

    def random_leaf(heads: int) -> Tensor:
        values = torch.randn((length, batch, heads, head_size), generator=generator).to(dtype)
        return values.to(device, torch.float32).requires_grad_()

    whole = [random_leaf(heads) for heads in (QUERY_HEADS, key_heads, key_heads)]
    above = random_leaf(QUERY_HEADS).detach()
    expected = reference(*whole)
    expected.backward(above)

    chunks = torch.arange(length, device=device).chunk(2 * group.size())
    mine = torch.cat((chunks[group.rank()], chunks[-1 - group.rank()]))
    own = [part.detach()[mine].to(dtype).requires_grad_() for part in whole]
    output = attend(*own)
    output.backward(above[mine].to(dtype))
    pairs = [(output, expected[mine]), *((part.grad, one.grad[mine]) for part, one in zip(own, whole, strict=True))]
    for name, (found, reference) in zip(("output", "queries", "keys", "values"), pairs, strict=True):
        scale = reference.norm().clamp(min=1)  # a token that is alone gives its query no gradient
        error = ((found.float() - reference).norm() / scale).item()
        assert error < (1e-5 if dtype == torch.float32 else 0.01), f"{name}: relative error {error:.2g}"
