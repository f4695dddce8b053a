"""Where two models part: the first module, in the order of the weight table, whose outputs differ.

The table names the modules of both models and says how their outputs correspond: a linear layer's outputs are split
and merged along the features as the rows of its weight are. Shapes: F features, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping, tensor_mappings
from pretrainkit.checkpoint.transforms import unshard
from pretrainkit.config.schema import ModelShape
from pretrainkit.models.family import Layout

TOLERANCE = 1e-4
"""Largest difference of a module's outputs, relative to the largest of them; fp32 rounds at 1e-7."""


def compared_modules(mappings: Sequence[TensorMapping]) -> list[tuple[TensorMapping, str, tuple[str, ...]]]:
    """The rows of a weight table that are modules in both models, with their names in Megatron and in transformers.

    Experts and their router are left out: each model orders the experts' tokens in its own way, and Megatron-core's
    router gives probabilities where that of transformers gives logits.
    """
    suffix = ".weight"
    return [
        (mapping, str(mapping).removesuffix(suffix), tuple(name.removesuffix(suffix) for name in mapping.hf))
        for mapping in mappings
        if mapping.expert is None and str(mapping).endswith(suffix) and ".router." not in str(mapping)
    ]


@contextmanager
def recorded(model: torch.nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs [F, S] of the modules of these names during a forward pass of one sequence."""
    outputs: dict[str, Tensor] = {}
    # A multimodal model of transformers has those of its text model in a module.
    modules = {name.replace("model.language_model.", "model.", 1): module for name, module in model.named_modules()}

    def keep(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor):  # [1, S, ...] or [S, 1, ...]
            num_tokens = tensor.shape[0] * tensor.shape[1]
            outputs[name] = tensor.detach().float().reshape(num_tokens, -1).T.contiguous()

    hooks = [
        modules[name].register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name in names
        if name in modules
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def keep_outputs(model: torch.nn.Module, tokens: Tensor, shape: ModelShape, path: Path) -> None:
    """Run a Hugging Face model on tokens [1, S], and write the outputs of its compared modules."""
    names = [name for *_, theirs in compared_modules(tensor_mappings(shape)) for name in theirs]
    with torch.no_grad(), recorded(model, names) as outputs:
        model(tokens)
    torch.save(outputs, path)


def compare_outputs(model: torch.nn.Module, run: Callable[[], Any], shape: ModelShape, path: Path) -> str:
    """Run a Megatron-core model, on every rank at once, and compare with the outputs in `path`: `first_difference`."""
    mappings = tensor_mappings(shape)
    with recorded(model, [ours for _, ours, _ in compared_modules(mappings)]) as local:
        run()
    gathered = {}
    for name, output in local.items():
        gathered[name] = [torch.empty_like(output) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered[name], output)
    return first_difference(mappings, gathered, torch.load(path))


def first_difference(
    mappings: Sequence[TensorMapping],
    megatron: Mapping[str, Sequence[Tensor]],
    hugging_face: Mapping[str, Tensor],
) -> str:
    """A sentence that names the first module whose outputs differ, and the last one before it.

    `megatron` are the outputs of each tensor parallel rank.
    """
    before = "none"
    for mapping, ours, theirs in compared_modules(mappings):
        expected = [hugging_face[name] for name in theirs if name in hugging_face]
        if ours not in megatron or len(expected) < len(theirs):
            continue
        sizes = [rows for rows, *_ in mapping.shapes] if mapping.weight.is_fused else [len(each) for each in expected]
        found = _whole(mapping.layout, megatron[ours], expected[0].shape[1], sizes, mapping.weight.groups)
        count = mapping.weight.num_fused
        found = [torch.cat(found[:count]), *found[count:]] if mapping.weight.is_fused else found
        for name, output, wanted in zip(theirs, found, expected, strict=True):
            if output.shape != wanted.shape:
                continue  # the two implementations put the border of the module elsewhere
            difference, largest = float((output - wanted).abs().max()), float(wanted.abs().max())
            if not difference <= TOLERANCE * largest:
                return (
                    f"the outputs of {name} (Megatron-core: {ours}) are the first that differ: by up to "
                    f"{difference:.1e} at values up to {largest:.1e}; the last before it that are equal: {before}"
                )
            before = name
    return f"no module's outputs differ by more than {TOLERANCE} of the largest; the last that is equal: {before}"


def _whole(
    layout: Layout, parts: Sequence[Tensor], num_tokens: int, counts: Sequence[int], groups: int
) -> list[Tensor]:
    """The outputs in transformers' form, of `counts` features, from those of all tensor parallel ranks."""
    if len(parts) > 1 and parts[0].shape[1] < num_tokens:  # sequence parallelism: each rank has some of the tokens
        parts = [torch.cat(list(parts), dim=1)]
    parts = [part[:, :num_tokens] for part in parts]  # without the tokens that fill up a call
    if parts[0].shape[0] >= sum(counts):  # each rank has all features
        parts = parts[:1]
    if layout not in (Layout.QKV, Layout.GATED):
        return [torch.cat(list(parts))[: counts[0]]]
    lazy = unshard(layout, [LazyTensor.of(part) for part in parts], rows=counts, groups=groups)
    return [tensor.tensor() for tensor in lazy]
