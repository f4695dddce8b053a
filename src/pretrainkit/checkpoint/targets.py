"""Opens the source and the target of a conversion: which reader and writer, and the files beside the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pretrainkit.checkpoint.detect import HF_SOURCE, TRACKER_NAME, Found, Kind
from pretrainkit.checkpoint.formats import hf, nemo
from pretrainkit.checkpoint.formats.megatron_args import megatron_args
from pretrainkit.checkpoint.formats.torch_dist_reader import TorchDistSource
from pretrainkit.checkpoint.formats.torch_dist_writer import TorchDistTarget
from pretrainkit.checkpoint.formats.torch_legacy import CHECKPOINT_VERSION, TorchSource
from pretrainkit.checkpoint.formats.torch_legacy_writer import TorchTarget
from pretrainkit.checkpoint.lazy_tensor import Rows
from pretrainkit.checkpoint.mapping import Entry, MegatronContent
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape
from pretrainkit.models.registry import read_config

MEGATRON_VOCABULARY_DIVISOR = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by."""


class Source(Protocol):
    """Where the weights come from."""

    def dtype(self, entry: Entry) -> torch.dtype:
        """Of the stored tensor."""

    def read(self, entry: Entry) -> list[Rows]:
        """The Hugging Face tensors of an entry."""

    def notes(self) -> list[str]:
        """What was left out, for the report."""


class Target(Protocol):
    """Where the weights go."""

    parts: list[list[Entry]]
    """Entries by worker."""

    def write_part(self, part: int, values: Iterable[tuple[Entry, Sequence[Rows]]]) -> None:
        """Write the entries of `parts[part]`, which come in that order."""

    def finish(self) -> None:
        """Write what completes the checkpoint."""


def open_source(found: Found, entries: Sequence[Entry], shape: ModelShape) -> Source:
    """The reader of a recognised folder; raises unless it holds exactly the model's tensors."""
    if found.kind is Kind.HF:
        return hf.HfSource(found.weights, entries, tied=shape.tie_word_embeddings)
    if found.kind is Kind.TORCH:
        return TorchSource(found.weights, entries, shape)
    if found.kind is Kind.NEMO:
        nemo.check_settings(found.root / "context", shape)
    return TorchDistSource(found.weights, entries, shape)


@dataclass(frozen=True)
class TargetPlan:
    """What is going to be written."""

    kind: Kind
    shape: ModelShape
    entries: Sequence[Entry]
    dtypes: Mapping[Entry, torch.dtype]
    hf_folder: Path
    """Where config.json, tokenizer and generation config come from."""
    parallelism: Parallelism
    vocabulary_divisor: int | None
    iteration: int | None
    max_shard_bytes: int
    workers: int

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries:
            sizes[self.dtypes[entry]] = sizes.get(self.dtypes[entry], 0) + entry.numel
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(entry.numel * self.dtypes[entry].itemsize for entry in self.entries)

    @property
    def divisor(self) -> int:
        """What the vocabulary is padded to a multiple of, per tensor parallel rank."""
        if self.vocabulary_divisor is not None:
            return self.vocabulary_divisor
        return 1 if self.kind in (Kind.NEMO, Kind.HF) else MEGATRON_VOCABULARY_DIVISOR

    @property
    def padded_rows(self) -> int:
        """Rows of the embedding that is written."""
        if self.kind is Kind.HF:
            return self.shape.vocab_size
        return padded_vocabulary(self.shape.vocab_size, self.divisor, self.parallelism.tensor)

    def check(self) -> None:
        """Raise RequestError for what the format can't express; nothing is written yet."""
        if self.kind is Kind.NEMO:
            self._nemo_model()
        elif self.kind is not Kind.HF:
            self._common()

    def open(self, folder: Path) -> Target:
        """Write what belongs beside the weights into an empty folder, and give the writer of the weights."""
        if self.kind is Kind.HF:
            hf.write_config(folder, hf.release_config(read_config(self.hf_folder), self.main_dtype))
            hf.copy_side_files(self.hf_folder, folder)
            return hf.HfTarget(folder, self.entries, self.dtypes, max_shard_bytes=self.max_shard_bytes)
        carry_hf_files(self.hf_folder, folder)
        if self.kind is Kind.NEMO:
            nemo.write_context(folder / "context", self._nemo_model(), self.hf_folder)
            (folder / "weights").mkdir()
            content = self._content(nemo.common_state())
            return TorchDistTarget(folder / "weights", content, prefix="module.")
        name = "release" if self.iteration is None else f"iter_{self.iteration:07d}"
        (folder / name).mkdir()
        tracked = "release" if self.iteration is None else str(self.iteration)
        (folder / TRACKER_NAME).write_text(tracked, encoding="ascii")
        if self.kind is Kind.TORCH_DIST:
            common = {**self._common(), "content_metadata": dict(nemo.CONTENT_METADATA)}
            return TorchDistTarget(folder / name, self._content(common), prefix="")
        return TorchTarget(folder / name, self._content(self._common()), self.parallelism)

    def _content(self, common: Mapping[str, Any]) -> MegatronContent:
        return MegatronContent(self.entries, self.dtypes, self.shape, common, self.padded_rows, self.workers)

    def _nemo_model(self) -> nemo.Call:
        return nemo.model_call(
            self.shape,
            self.main_dtype,
            vocabulary_divisor=self.divisor,
            has_generation_config=(self.hf_folder / nemo.GENERATION_CONFIG).is_file(),
        )

    def _common(self) -> dict[str, Any]:
        """What Megatron-LM keeps beside the model."""
        arguments = megatron_args(
            self.shape,
            self.parallelism,
            padded_vocab_size=self.padded_rows,
            divisor=self.divisor,
            dtype=self.main_dtype,
            format=str(self.kind),
        )
        return {
            "args": arguments,
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": self.iteration or 0,
            "num_floating_point_operations_so_far": 0,
        }


def carry_hf_files(hf_folder: Path, folder: Path) -> None:
    """Keep the model's config.json and side files with a Megatron checkpoint, for the way back."""
    target = folder / HF_SOURCE
    target.mkdir()
    shutil.copyfile(hf_folder / "config.json", target / "config.json")
    hf.copy_side_files(hf_folder, target)
