"""What a conversion is asked for, and what it therefore writes: format, tensors, dtypes, layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.added_tokens import NewToken
from pretrainkit.checkpoint.lazy_tensor import StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape


class CheckpointFormat(StrEnum):
    """The formats that are read and written."""

    HF = "hf"
    """Hugging Face folder: config.json and safetensors."""
    NEMO = "nemo"
    """NeMo 2 checkpoint: weights/ (torch_dist) and context/."""
    TORCH_DIST = "torch_dist"
    """Megatron-LM's distributed checkpoint: tracker file and iter_NNNNNNN/ or release/."""
    TORCH = "torch"
    """Megatron-LM's classic checkpoint: tracker file and mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt."""


MEGATRON_LM = (CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST)
"""The formats of Megatron-LM, with its arguments."""


@dataclass(frozen=True)
class Options:
    """Settings of a conversion."""

    to: CheckpointFormat | None = None
    """Target format; by default nemo from Hugging Face, and hf from anything else."""
    hf_folder: Path | None = None
    """Config.json, tokenizer and generation config, for a Megatron source that doesn't carry them."""
    dtype: torch.dtype | None = None
    """Cast the weights; by default they keep theirs."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    """Cut of a classic checkpoint; the other formats are independent of it."""
    vocabulary_divisor: int | None = None
    """Pad the vocabulary to a multiple of this times the tensor parallel size. By default 128 for Megatron-LM's
    formats, as it does itself, and 1 for NeMo's, whose models pad while loading."""
    iteration: int | None = None
    """Write Megatron-LM's formats as this iteration instead of as a release."""
    max_shard_bytes: int = 5_000_000_000
    """Largest safetensors file."""
    workers: int = 1
    """Files written at a time."""
    overwrite: bool = False
    """Replace an existing target, once the new one is complete."""
    ignore_config_fields: tuple[str, ...] = ()
    """Unknown fields of config.json that change nothing in the forward pass."""
    allow_nonfinite: bool = False
    """Convert weights with NaN and infinities, and report them."""
    new_tokens: tuple[NewToken, ...] = ()
    """Tokens that the vocabulary gets."""
    keep_config: bool = False
    """Copy config.json and tokenizer_config.json into a Hugging Face folder byte for byte, instead of in the spelling
    that both generations of transformers read."""


@dataclass(frozen=True)
class ConversionPlan:
    """What is written: input of every writer."""

    format: CheckpointFormat
    shape: ModelShape
    mappings: Sequence[TensorMapping]
    """All tensors, in the order in which they are written."""
    dtypes: Mapping[TensorMapping, torch.dtype]
    """Dtype of each tensor in the target."""
    hf_folder: Path
    """Folder with the model's config.json, tokenizer and generation config."""
    options: Options = field(default_factory=Options)
    run_state: Mapping[str, Any] = field(default_factory=dict)
    """What a source of Megatron-LM's knows of its run (`megatron_lm.run_state`)."""
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The tensors of a multimodal model besides its text model's, which stay as they are."""

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        sizes: Counter[torch.dtype] = Counter()
        for mapping in self.mappings:
            sizes[self.dtypes[mapping]] += mapping.numel
        return sizes.most_common(1)[0][0]

    @property
    def grouped_experts(self) -> bool:
        """Whether Megatron-LM is to run all experts of a rank in one GEMM, for which it asserts bf16."""
        return self.main_dtype == torch.bfloat16

    @property
    def num_bytes(self) -> int:
        """Size of all weights, without vocabulary padding."""
        return self._mapped_bytes + sum(tensor.meta.nbytes for tensor in self.carried.values())

    @property
    def _mapped_bytes(self) -> int:
        return sum(self.size(mapping) for mapping in self.mappings)

    @property
    def vocabulary_divisor(self) -> int:
        """The vocabulary is padded to a multiple of this times the tensor parallel size."""
        return self.options.vocabulary_divisor or (128 if self.format in MEGATRON_LM else 1)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in Megatron's formats."""
        return padded_vocabulary(self.shape.vocab_size, self.vocabulary_divisor, self.options.parallelism.tensor)

    def size(self, mapping: TensorMapping) -> int:
        """Size of a tensor in the target, bytes."""
        return mapping.numel * self.dtypes[mapping].itemsize

    def parts(self) -> list[list[TensorMapping]]:
        """The tensors, in order, in at most one run per worker; the runs have about equal sizes."""
        parts: list[list[TensorMapping]] = [[] for _ in range(min(self.options.workers, len(self.mappings)))]
        total, done = self._mapped_bytes, 0
        for mapping in self.mappings:
            parts[min(done * len(parts) // max(total, 1), len(parts) - 1)].append(mapping)
            done += self.size(mapping)
        return [part for part in parts if part]

    def shards(self) -> list[list[TensorMapping]]:
        """The tensors, in order, by safetensors file; one that is larger than the limit gets its own file."""
        shards: list[list[TensorMapping]] = [[]]
        used = 0
        for mapping in self.mappings:
            size = self.size(mapping) * (mapping.weight.num_stacked or 1)
            is_rest = mapping.num_tensors == 0  # of a tensor that the file has begun with
            if shards[-1] and not is_rest and used + size > self.options.max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append(mapping)
            used += self.size(mapping)
        return shards
