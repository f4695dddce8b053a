"""What context parallelism computes in bf16 with each of the layers' settings, beside one rank and fp32.

Every rank calls `measure`; errors are relative L2 norms of the difference from fp32 on the whole sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, distributed

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.config.schema import ModelShape
from pretrainkit.megatron import model as megatron_model
from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.document_attention import chunks_of, segment_bounds

BATCH, SCALE = 2, 0.11


@dataclass(frozen=True)
class Case:
    """Settings of one layer's attention."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    documents: bool = False
    heads: tuple[int, int] = (8, 2)
    size: int = 128


CASES = {
    "causal": Case(),
    "causal, 192": Case(heads=(4, 4), size=192),
    "window": Case(window=100),
    "window beyond a chunk": Case(window=900),
    "window, 256": Case(window=300, heads=(4, 2), size=256),
    "sinks": Case(sinks=True, size=64),
    "window, sinks": Case(window=128, sinks=True, size=64),
    "softcap": Case(softcap=2.0),
    "window, softcap": Case(window=700, softcap=2.0),
    "documents": Case(documents=True),
    "documents, window": Case(documents=True, window=100),
    "documents, sinks": Case(documents=True, sinks=True, size=64),
    "documents, window, sinks": Case(documents=True, window=200, sinks=True, size=64),
}


@dataclass(frozen=True)
class Setup:
    """A device and the sizes that it is fast enough for."""

    device: str
    dtype: torch.dtype
    length: int
    steps: int


def measure_on_cpu(rank: int, world_size: int, *, output: Path) -> None:
    """Measure attention over gloo, in fp32."""
    distributed.init_process_group("gloo")
    measure(output, Setup("cpu", torch.float32, 256, 0), {})


def measure(output: Path, setup: Setup, shapes: dict[str, ModelShape]) -> None:
    """Write the errors of CASES and losses and gradients of models, in groups of 2 and of all ranks, as JSON."""
    ranks = distributed.get_world_size()
    found: dict[str, Any] = {"attention": {}, "families": {}, "training": {}}
    alone = [distributed.new_group([rank]) for rank in range(ranks)][distributed.get_rank()]
    for size in sorted({2, ranks}):
        groups = [distributed.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        group = groups[distributed.get_rank() // size]
        for name, case in CASES.items():
            _keep(found["attention"], f"{name}, CP={size}", _attention_errors(case, setup, group, alone))
    for name, results in _models(setup, shapes, ranks):
        kind, _, name = name.partition(": ")
        _keep(found[kind], name, results)
    if distributed.get_rank() == 0:
        output.write_text(json.dumps(found))


def _keep(found: dict[str, Any], name: str, results: Any) -> None:
    found[name] = results
    if distributed.get_rank() == 0:
        print(f"{name}: {json.dumps(results)}", flush=True)


def own_tokens(length: int, group: distributed.ProcessGroup) -> Tensor:
    """The positions of a rank's tokens."""
    chunks = torch.arange(length).chunk(2 * group.size() if group.size() > 1 else 1)
    return torch.cat([chunks[number] for number in chunks_of(group.rank(), group.size())])


def document_positions(length: int) -> Tensor:
    """Position ids [b, s] of two rows of documents, of which one crosses most chunks."""
    rows = [[0, length // 9, length // 9 + 1, length // 3 + 5, length - 3], [0, length - length // 7 - 1]]
    positions = torch.arange(length).repeat(BATCH, 1)
    for row, begins in zip(positions, rows, strict=True):
        for begin in begins:
            row[begin:] = torch.arange(length - begin)
    return positions


def _attention_errors(
    case: Case, setup: Setup, group: distributed.ProcessGroup, alone: distributed.ProcessGroup
) -> dict[str, tuple[float, float]]:
    """Of output and gradients: the error of one rank, and that of the group."""
    heads, groups = case.heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(setup.length, BATCH, count, case.size) for count in (heads, groups, groups, heads)]
    q, k, v, above = (torch.randn(shape, generator=generator).to(setup.dtype) for shape in shapes)
    whole = [part.to(setup.device) for part in (q, k, v, above)]
    sinks = torch.randn(heads, generator=generator).to(setup.dtype).to(setup.device)
    positions = document_positions(setup.length) if case.documents else None
    in_fp32 = (part.to(torch.float32, copy=True) for part in (*whole, sinks))
    exact = _by_scores(case, *in_fp32, positions)
    errors = [_module_errors(case, whole, sinks, positions, exact, each) for each in (alone, group)]
    return {name: (one, errors[1][name]) for name, one in errors[0].items()}


def _by_scores(
    case: Case, q: Tensor, k: Tensor, v: Tensor, above: Tensor, sinks: Tensor, positions: Tensor | None
) -> dict[str, Tensor]:
    """Output and gradients on whole sequences, with a mask, in fp32."""
    leaves = {"queries": q, "keys": k, "values": v, **({"sinks": sinks} if case.sinks else {})}
    for leaf in leaves.values():
        leaf.requires_grad_()
    tokens = torch.arange(len(q), device=q.device)
    distance = tokens[:, None] - tokens
    mask = (distance >= 0) & (distance < (case.window or len(q)))
    if positions is not None:
        first = (tokens - positions.to(q.device))[:, None, :, None]  # [b, 1, s, 1]
        mask = mask & (tokens >= first)
    key, value = (part.repeat_interleave(case.heads[0] // case.heads[1], 2) for part in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, key) * SCALE
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if case.sinks:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    out = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1)[..., : len(q)], value)
    out.backward(above)
    return {"output": out.detach(), **{name: _gradient(leaf) for name, leaf in leaves.items()}}


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _module_errors(
    case: Case,
    whole: list[Tensor],
    sinks: Tensor,
    positions: Tensor | None,
    exact: dict[str, Tensor],
    group: distributed.ProcessGroup,
) -> dict[str, float]:
    heads, groups = case.heads
    features = LayerFeatures(
        local_layers=(0,),
        sliding_window=case.window,
        attention_softcap=case.softcap,
        attention_sinks=case.sinks,
        attention_scale=SCALE,
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * case.size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=case.size,
        attention_dropout=0.0,
        params_dtype=sinks.dtype,
        perform_initialization=False,
    )
    ranks: Any = SimpleNamespace(cp=group, tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    module = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=ranks, features=features)
    if module.softmax_offset is not None:
        module.softmax_offset.data.copy_(sinks)
    mine = own_tokens(len(whole[0]), group).to(sinks.device)
    q, k, v = (part[mine].requires_grad_() for part in whole[:3])
    bounds = None
    if positions is not None:
        bounds = segment_bounds(positions, group.rank(), group.size()).to(sinks.device)
    out = module(q, k, v, bounds)
    out.backward(whole[3][mine].flatten(2))
    pairs = {
        "output": (out.detach().view_as(q), exact["output"][mine]),
        **{name: (_gradient(part), exact[name][mine]) for name, part in (("queries", q), ("keys", k), ("values", v))},
    }
    errors = {}
    for name, (found, wanted) in pairs.items():
        squares = torch.stack(((found.float() - wanted).square().sum(), wanted.square().sum()))
        errors[name] = _ratio(_summed(squares, group))
    if module.softmax_offset is not None:  # whose gradients Megatron sums over context-parallel ranks
        of_sinks = _summed(_gradient(module.softmax_offset).float(), group)
        errors["sinks"] = _ratio(
            torch.stack(((of_sinks - exact["sinks"]).square().sum(), exact["sinks"].square().sum()))
        )
    return errors


def _summed(values: Tensor, group: distributed.ProcessGroup) -> Tensor:
    if group.size() > 1:
        distributed.all_reduce(values, group=group)
    return values


def _ratio(squares: Tensor) -> float:
    return float((squares[0] / squares[1]).sqrt())


def _models(setup: Setup, shapes: dict[str, ModelShape], ranks: int) -> Iterator[tuple[str, Any]]:
    """Relative errors of gradients and losses of whole models, on one rank and on two; and losses of a few steps."""
    losses: dict[str, dict[int, list[float]]] = {}
    exact, errors = {}, {}
    for size in (1, 2):
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        megatron_model.model_parallel_cuda_manual_seed(0)
        for name, shape in shapes.items():
            if name in TRAINED:
                losses.setdefault(name, {})[size] = train(shape, setup, has_documents="documents" in name)
                continue
            if size == 1:
                exact[name] = _gradients(shape, torch.float32, setup.device)
            found = _gradients(shape, setup.dtype, setup.device)
            norms = {
                weight: ((found[weight] - wanted).norm() / wanted.norm().clamp(min=1e-8)).item()
                for weight, wanted in exact[name].items()
                if wanted.numel() > 1
            }
            errors.setdefault(name, []).append(norms)
            if distributed.get_rank() == 0:
                print(f"{name}: {size} ranks, largest error {max(norms.values()):.4f}", flush=True)
        parallel_state.destroy_model_parallel()
    for name, each in losses.items():
        yield f"training: {name}", [each[1], each[2]]
    for name, (one, two) in errors.items():
        worst = max(two, key=lambda weight, one=one, two=two: two[weight] / (one[weight] + 1e-2))
        yield f"families: {name}", {"worst": worst, "one rank": one[worst], "two ranks": two[worst]}


def _model(shape: ModelShape, dtype: torch.dtype, device: str, length: int) -> Any:
    """A model with fixed weights, which bf16 has exactly."""
    model: Any = megatron_model.build_model(
        shape,
        padded_vocab_size=shape.vocab_size,
        sequence_length=length,
        precision="fp32" if dtype == torch.float32 else "bf16",
    ).to(device)
    model.config.context_parallel_size = parallel_state.get_context_parallel_world_size()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        values = 0.05 * torch.randn(parameter.shape, generator=generator) + ("norm" in name)
        parameter.data.copy_(values.to(torch.bfloat16))
    return model


def _loss(model: Any, tokens: Tensor, bounds: Tensor | None = None) -> Tensor:
    """The mean loss [] of this rank's tokens of sequences [b, s + 1]."""
    group = parallel_state.get_context_parallel_group()
    mine = own_tokens(tokens.size(1) - 1, group).to(tokens.device)
    positions = mine.expand(len(tokens), -1)
    losses: Tensor = model(tokens[:, :-1][:, mine], positions, bounds, labels=tokens[:, 1:][:, mine])
    return losses.mean()


def _mean(values: Tensor) -> Tensor:
    group = parallel_state.get_context_parallel_group()
    return _summed(values, group) / group.size()


def _gradients(shape: ModelShape, dtype: torch.dtype, device: str, length: int = 256) -> dict[str, Tensor]:
    model = _model(shape, dtype, device, length)
    tokens = torch.randint(shape.vocab_size, (BATCH, length + 1), generator=torch.Generator().manual_seed(2))
    _loss(model, tokens.to(device)).backward()
    return {name: _mean(_gradient(parameter).float()) for name, parameter in model.named_parameters()}


TRAINED = {
    "llama": LayerFeatures(),
    "windows, sinks": LayerFeatures(local_layers=(0, 2), sliding_window=100, attention_sinks=True),
    "documents": LayerFeatures(),
    "documents, windows": LayerFeatures(local_layers=(0, 2), sliding_window=100),
}
"""Models that are trained for some steps: what differs from Llama's layers."""


def train(shape: ModelShape, setup: Setup, *, has_documents: bool) -> list[float]:
    """Losses of steps of AdamW with weights in fp32, on one batch of text that repeats itself."""
    group, length = parallel_state.get_context_parallel_group(), setup.length // 2
    model = _model(replace(shape), setup.dtype, setup.device, length)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocab_size, (BATCH, 64), generator=generator).repeat(1, length // 64 + 1)
    tokens = tokens[:, : length + 1].to(setup.device)
    bounds = None
    if has_documents:
        bounds = segment_bounds(document_positions(length), group.rank(), group.size()).to(setup.device)
    losses = []
    for _ in range(setup.steps):
        loss = _loss(model, tokens, bounds)
        loss.backward()
        losses.append(_mean(loss.detach().float()).item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = _mean(_gradient(parameter).float())
            parameter.grad = None
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    return losses
