"""The release gate's comparison of weights, tensor by tensor, with the checkpoint that they came from.

Released weights are read with the safetensors package and not with this project's own reader, so that a fault in
the reader can't hide one in the writer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from pretrainkit.checkpoint.formats.carried import carried_tensors
from pretrainkit.checkpoint.formats.hf import open_by_package
from pretrainkit.checkpoint.lazy_tensor import same_bits
from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.models.family import Layout
from pretrainkit.models.hf_config import dtype_of
from pretrainkit.models.multimodal import whole_name
from pretrainkit.models.registry import read_config, read_whole_config
from pretrainkit.release.report import Check
from pretrainkit.release.source import ReleaseSource, wrong_rows

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Names that config.json has had for the dtype of the weights."""


def check_weights(source: ReleaseSource, released: Path) -> Iterator[Check]:
    shape = source.shape
    mappings = tensor_mappings(shape)
    carried = carried_tensors(source.hf_folder)
    config = read_whole_config(source.hf_folder)
    wanted = {whole_name(name, config) for mapping in mappings for name in mapping.hf}
    declared = _declared_dtype(released)
    problems: defaultdict[str, list[str]] = defaultdict(list)
    if declared is None:
        problems["dtypes"].append(f"config.json states {dtype_of(read_config(released)) or 'none'}")
    casts, num_elements = set(), 0
    with ExitStack() as stack:
        read, names = open_by_package(released, stack)
        head = whole_name("lm_head.weight", config)
        extra = names - wanted - carried.keys() - ({head} if shape.tie_word_embeddings else set())
        yield Check.of("every tensor is there", sorted(wanted - names), f"{len(wanted)} tensors")
        yield Check.of("no tensor that the architecture doesn't have", sorted(extra), "none")
        if carried:
            different = [n for n, there in carried.items() if n not in names or not same_bits(read(n), there.read())]
            fine = f"{len(carried)} tensors bit-equal"
            yield Check.of("the rest of the multimodal model is the source's", sorted(different), fine)
        for mapping, tensors in source.read_tensors():
            keep_dtype, is_stacked = mapping.weight.keep_dtype, mapping.weight.num_stacked > 0
            count = mapping.weight.num_fused
            whole = [torch.cat(tensors[:count]), *tensors[count:]] if mapping.weight.is_fused else tensors
            if is_stacked:  # the part of one expert
                rows = torch.stack(tensors, 1).flatten(0, 1) if mapping.weight.is_alternating else torch.cat(tensors)
                whole = [rows.t() if mapping.weight.is_transposed else rows]
            for name, hf_shape, expected in zip(mapping.hf, mapping.hf_shapes, whole, strict=True):
                hf_shape = hf_shape[1:] if is_stacked else hf_shape
                expected = expected.reshape(hf_shape)  # of a scalar
                if (name := whole_name(name, config)) not in names:
                    continue
                tensor = read(name, mapping.expert if is_stacked else None)
                if expected.dtype != tensor.dtype:
                    casts.add(f"{expected.dtype} to {tensor.dtype}".replace("torch.", ""))
                    if keep_dtype:
                        problems["dtypes"].append(f"{name} must not be cast")
                if source.extension and mapping.layout is Layout.VOCABULARY and tensor.shape == expected.shape:
                    wrong = wrong_rows(tensor, expected, source.extension)
                    problems["rows"] += [f"{name}: {token}" for token in wrong]
                    expected = expected.to(tensor.dtype)
                    new = slice(source.extension.ids.start, source.extension.ids.stop)
                    expected[new] = tensor[new]
                dtype = None if keep_dtype else declared
                for kind, problem in _problems(name, tensor, expected, hf_shape, dtype):
                    if kind != "zeros" or not keep_dtype:  # biases of experts that no training has moved
                        problems[kind].append(problem)
                num_elements += tensor.numel()
        if shape.tie_word_embeddings and head in names:
            embedding = read(whole_name("model.embed_tokens.weight", config))
            same = same_bits(read(head), embedding)
            yield Check("tied weights are equal", same, "lm_head.weight and model.embed_tokens.weight")
    if source.extension:
        fine = f"{len(source.extension.ids)} rows; every other row is in the comparison with the source"
        yield Check.of("rows of new tokens begin as stated", problems["rows"], fine)
    cast = f", cast from {', '.join(sorted(casts))}" if casts else ""
    for kind, title, fine in (
        ("shapes", "shapes", "right"),
        ("bits", "bit-equal to the source after the inverse mapping", f"{num_elements} elements{cast}"),
        ("finite", "finite", "all elements"),
        ("zeros", "no tensor of zeros", "none"),
        ("dtypes", "dtype is what config.json says", str(declared)),
    ):
        yield Check.of(title, problems[kind], fine)


def _problems(
    name: str, tensor: Tensor, expected: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Iterator[tuple[str, str]]:
    """What is wrong with a released tensor, with its kind; `dtype` is None where any is right."""
    if tuple(tensor.shape) != shape:
        yield "shapes", f"{name} {list(tensor.shape)} and not {list(shape)}"
        return
    if dtype not in (None, tensor.dtype):
        yield "dtypes", f"{name} is {tensor.dtype}"
    expected = expected.to(tensor.dtype)
    if not same_bits(tensor, expected):
        yield "bits", f"{name} ({int((tensor != expected).sum())} of {tensor.numel()} elements)"
    if not torch.isfinite(tensor).all():
        yield "finite", name
    if not name.endswith("bias") and not tensor.any():
        yield "zeros", name


def _declared_dtype(released: Path) -> torch.dtype | None:
    dtype = getattr(torch, dtype_of(read_config(released)) or "", None)
    return dtype if isinstance(dtype, torch.dtype) else None
