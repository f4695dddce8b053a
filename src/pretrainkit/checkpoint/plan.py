"""What a conversion writes: tensors with their dtypes, and the settings of the target's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape


@dataclass(frozen=True)
class ConversionPlan:
    """Input of every writer; the settings that a format doesn't have are ignored by its writer."""

    shape: ModelShape
    mappings: Sequence[TensorMapping]
    """All tensors, in the order in which they are written."""
    dtypes: Mapping[TensorMapping, torch.dtype]
    """Dtype of each tensor in the target."""
    hf_folder: Path
    """Folder with the model's config.json, tokenizer and generation config."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    vocabulary_divisor: int = 1
    """The vocabulary is padded to a multiple of this times the tensor parallel size."""
    iteration: int | None = None
    """Iteration in Megatron-LM's formats; None writes a release."""
    max_shard_bytes: int = 5_000_000_000
    """Largest safetensors file."""
    workers: int = 1
    """Number of files that are written at the same time."""

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        sizes: dict[torch.dtype, int] = {}
        for mapping in self.mappings:
            sizes[self.dtypes[mapping]] = sizes.get(self.dtypes[mapping], 0) + mapping.numel
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_bytes(self) -> int:
        """Size of all weights, without vocabulary padding."""
        return sum(self.size(mapping) for mapping in self.mappings)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in Megatron's formats."""
        return padded_vocabulary(self.shape.vocab_size, self.vocabulary_divisor, self.parallelism.tensor)

    def size(self, mapping: TensorMapping) -> int:
        """Size of a tensor in the target, bytes."""
        return mapping.numel * self.dtypes[mapping].itemsize

    def parts(self) -> list[list[TensorMapping]]:
        """The tensors, in order, in at most one run per worker; the runs have about equal sizes."""
        parts: list[list[TensorMapping]] = [[] for _ in range(min(self.workers, len(self.mappings)))]
        total, done = self.num_bytes, 0
        for mapping in self.mappings:
            parts[min(done * len(parts) // max(total, 1), len(parts) - 1)].append(mapping)
            done += self.size(mapping)
        return [part for part in parts if part]

    def shards(self) -> list[list[TensorMapping]]:
        """The tensors, in order, by safetensors file; one that is larger than the limit gets its own file."""
        shards: list[list[TensorMapping]] = [[]]
        used = 0
        for mapping in self.mappings:
            if shards[-1] and used + self.size(mapping) > self.max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append(mapping)
            used += self.size(mapping)
        return shards
