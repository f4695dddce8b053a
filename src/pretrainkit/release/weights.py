"""The release gate's comparison of weights, tensor by tensor, with the checkpoint that they came from.

Released weights are read with the safetensors package and not with this project's own reader, so that a fault in
the reader can't hide one in the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from pretrainkit.checkpoint.detect import DetectedCheckpoint
from pretrainkit.checkpoint.formats.safetensors import open_by_package
from pretrainkit.checkpoint.mapping import TensorMapping, tensor_mappings
from pretrainkit.checkpoint.open import WeightReader, open_reader
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
            comparison.add(mapping, reader, read, missing)
        if shape.tie_word_embeddings and "lm_head.weight" in names:
            embedding = read("model.embed_tokens.weight")
            same = _same_bits(read("lm_head.weight"), embedding)
            yield Check("tied weights are equal", same, "lm_head.weight and model.embed_tokens.weight")
    yield from comparison.checks()


class _Comparison:
    """Collects what differs, tensor by tensor."""

    def __init__(self, declared: torch.dtype | None) -> None:
        self.declared = declared
        self.different: list[str] = []
        self.misshapen: list[str] = []
        self.not_finite: list[str] = []
        self.zero: list[str] = []
        self.dtypes: list[str] = []
        self.cast: set[str] = set()
        self.num_elements = 0

    def add(
        self, mapping: TensorMapping, reader: WeightReader, read: Callable[[str], Tensor], missing: set[str]
    ) -> None:
        """Compare the tensors of a mapping."""
        for name, shape, rows in zip(mapping.hf, mapping.shapes, reader.read(mapping), strict=True):
            if name in missing:
                continue
            tensor = read(name)
            if tuple(tensor.shape) != shape:
                self.misshapen.append(f"{name} {list(tensor.shape)} and not {list(shape)}")
                continue
            expected = rows.tensor()
            if expected.dtype != tensor.dtype:
                self.cast.add(f"{expected.dtype} to {tensor.dtype}".replace("torch.", ""))
                expected = expected.to(tensor.dtype)
                if mapping.weight.keep_dtype:
                    self.dtypes.append(f"{name} must not be cast")
            if self.declared not in (None, tensor.dtype) and not mapping.weight.keep_dtype:
                self.dtypes.append(f"{name} is {tensor.dtype}")
            if not _same_bits(tensor, expected):
                count = int((tensor != expected).sum())
                self.different.append(f"{name} ({count} of {tensor.numel()} elements)")
            if not torch.isfinite(tensor).all():
                self.not_finite.append(name)
            if not name.endswith("bias") and not tensor.any():
                self.zero.append(name)
            self.num_elements += tensor.numel()

    def checks(self) -> Iterator[Check]:
        """The results."""
        cast = f", cast from {', '.join(sorted(self.cast))}" if self.cast else ""
        yield Check.of("shapes", self.misshapen, "right")
        yield Check.of(
            "bit-equal to the source after the inverse mapping", self.different, f"{self.num_elements} elements{cast}"
        )
        yield Check.of("finite", self.not_finite, "all elements")
        yield Check.of("no tensor of zeros", self.zero, "none")
        yield Check.of("dtype is what config.json says", self.dtypes, str(self.declared))


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
