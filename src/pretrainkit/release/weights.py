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

from pretrainkit.checkpoint.formats.safetensors import open_by_package
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.checkpoint.open import DetectedCheckpoint, open_reader
from pretrainkit.config.schema import ModelShape
from pretrainkit.models.registry import read_config
from pretrainkit.release.report import Check

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Names that config.json has had for the dtype of the weights."""


def check_weights(found: DetectedCheckpoint, released: Path, shape: ModelShape) -> Iterator[Check]:
    mappings = tensor_mappings(shape)
    reader = open_reader(found, mappings, shape)
    wanted = {name for mapping in mappings for name in mapping.hf}
    with ExitStack() as stack:
        read, names = open_by_package(released, stack)
        extra = names - wanted - ({"lm_head.weight"} if shape.tie_word_embeddings else set())
        missing = wanted - names
        yield Check.of("every tensor is there", sorted(missing), f"{len(wanted)} tensors")
        yield Check.of("no tensor that the architecture doesn't have", sorted(extra), "none")
        comparison = _Comparison(_declared_dtype(released))
        for mapping in mappings:
            for name, hf_shape, expected in zip(mapping.hf, mapping.shapes, reader.read(mapping), strict=True):
                if name not in missing:
                    comparison.add(name, read(name), expected, hf_shape, keep_dtype=mapping.weight.keep_dtype)
        if shape.tie_word_embeddings and "lm_head.weight" in names:
            embedding = read("model.embed_tokens.weight")
            same = _same_bits(read("lm_head.weight"), embedding)
            yield Check("tied weights are equal", same, "lm_head.weight and model.embed_tokens.weight")
    yield from comparison.checks()


class _Comparison:
    """Collects the differences of tensors."""

    def __init__(self, declared: torch.dtype | None) -> None:
        self.declared = declared
        self.problems: defaultdict[str, list[str]] = defaultdict(list)
        self.cast: set[str] = set()
        self.num_elements = 0

    def add(self, name: str, tensor: Tensor, source: LazyTensor, shape: tuple[int, ...], *, keep_dtype: bool) -> None:
        """Compare a released tensor with the one in the source."""
        if tuple(tensor.shape) != shape:
            self.problems["shapes"].append(f"{name} {list(tensor.shape)} and not {list(shape)}")
            return
        expected = source.tensor()
        if expected.dtype != tensor.dtype:
            self.cast.add(f"{expected.dtype} to {tensor.dtype}".replace("torch.", ""))
            expected = expected.to(tensor.dtype)
            if keep_dtype:
                self.problems["dtypes"].append(f"{name} must not be cast")
        if self.declared not in (None, tensor.dtype) and not keep_dtype:
            self.problems["dtypes"].append(f"{name} is {tensor.dtype}")
        if not _same_bits(tensor, expected):
            count = int((tensor != expected).sum())
            self.problems["bits"].append(f"{name} ({count} of {tensor.numel()} elements)")
        if not torch.isfinite(tensor).all():
            self.problems["finite"].append(name)
        if not name.endswith("bias") and not tensor.any():
            self.problems["zeros"].append(name)
        self.num_elements += tensor.numel()

    def checks(self) -> Iterator[Check]:
        """The results."""
        cast = f", cast from {', '.join(sorted(self.cast))}" if self.cast else ""
        for kind, name, fine in (
            ("shapes", "shapes", "right"),
            ("bits", "bit-equal to the source after the inverse mapping", f"{self.num_elements} elements{cast}"),
            ("finite", "finite", "all elements"),
            ("zeros", "no tensor of zeros", "none"),
            ("dtypes", "dtype is what config.json says", str(self.declared)),
        ):
            yield Check.of(name, self.problems[kind], fine)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality of bits: 0 and -0 differ, a NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _declared_dtype(released: Path) -> torch.dtype | None:
    config = read_config(released)
    name = next((config[key] for key in DTYPE_FIELDS if config.get(key)), None)
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None
