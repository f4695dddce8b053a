"""The report of a conversion: what was written, and sentences about what was cast, added, left out or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pretrainkit.checkpoint import nonfinite
from pretrainkit.checkpoint.formats.hf_files import describe
from pretrainkit.checkpoint.formats.megatron_lm import required_flags, run_notes
from pretrainkit.checkpoint.open import WeightReader
from pretrainkit.checkpoint.plan import MEGATRON_LM, CheckpointFormat, ConversionPlan
from pretrainkit.config.schema import ModelShape
from pretrainkit.models.hf_config import absent_fields, dtype_of
from pretrainkit.models.registry import family_named, read_config
from pretrainkit.units import format_bytes, format_duration


@dataclass(frozen=True)
class Report:
    """The result of a conversion."""

    source: str
    source_kind: str
    target: str
    target_kind: str
    shape: ModelShape
    num_tensors: int
    """Number of Hugging Face tensors."""
    num_bytes: int
    """Size of their elements."""
    dtypes: dict[str, int]
    """Number of Hugging Face tensors by dtype."""
    elapsed_s: float
    notes: list[str]
    """Sentences about what was added, left out or changed."""
    workers: int
    """Files that were written at a time; torch_dist has as many."""
    source_fingerprint: str | None = None
    """Fingerprint of the source, if it is a Hugging Face folder whose weights weren't cast."""

    def as_text(self) -> str:
        """The report for people, in a few lines."""
        dtypes = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        lines = [
            f"{self.source} ({self.source_kind}) -> {self.target} ({self.target_kind})",
            f"{self.shape.family}, {self.num_tensors} tensors ({dtypes}), {format_bytes(self.num_bytes)}",
            f"{format_duration(self.elapsed_s)}, {format_bytes(self.num_bytes / self.elapsed_s)}/s",
            *self.notes,
        ]
        return "\n  ".join(lines)


def notes_of(reader: WeightReader, plan: ConversionPlan) -> Iterator[str]:
    """What was cast, left out or added, and what Megatron-LM needs as options."""
    changes = Counter(
        f"{name_of(reader.dtypes[mapping])} to {name_of(dtype)}"
        for mapping, dtype in plan.dtypes.items()
        for _ in range(mapping.num_tensors)
        if reader.dtypes[mapping] != dtype
    )
    for change, count in changes.items():
        yield f"{count} tensors cast from {change}"
    yield from _undeclared_dtypes(reader, plan)
    yield from reader.notes
    yield from run_notes(plan)
    for mapping in plan.mappings:
        if padding := reader.padding(mapping):
            found = nonfinite.describe_padding(padding.tensor())
            yield f"{padding.shape[0]} padding rows of {mapping} removed: {found}"
    rows, vocab_size = plan.padded_vocab_size - plan.shape.vocab_size, plan.shape.vocab_size
    if rows and plan.format is not CheckpointFormat.HF:
        multiple = f"{plan.vocabulary_divisor} x TP {plan.options.parallelism.tensor}"
        rule = f"{vocab_size} rounded up to a multiple of {multiple}"
        yield f"{rows} padding rows (zeros) added to the vocabulary: {rule}"
    if plan.format is CheckpointFormat.HF:
        yield from _description_notes(plan)
    elif absent := absent_fields(read_config(plan.hf_folder), family_named(plan.shape.family)):
        yield "config.json leaves out what its class in transformers sets: " + ", ".join(
            f"{name} {value!r}" for name, value in absent.items()
        )
    if plan.format in MEGATRON_LM:
        yield f"Megatron-LM needs, in addition to --use-checkpoint-args: {required_flags(plan)}"


def _undeclared_dtypes(reader: WeightReader, plan: ConversionPlan) -> Iterator[str]:
    """Weights of another dtype than config.json states, which transformers would round to it."""
    stated = dtype_of(read_config(plan.hf_folder))
    names: dict[str, list[str]] = {}
    for mapping, dtype in reader.dtypes.items():
        if name_of(dtype) != stated and not mapping.weight.keep_dtype:
            names.setdefault(name_of(dtype), []).extend(mapping.hf[: mapping.num_tensors])
    for dtype, tensors in names.items():
        listed = f"{', '.join(tensors[:4])}{' and more' if len(tensors) > 4 else ''}"
        said = f"dtype {stated}" if stated else "no dtype"
        yield f"config.json states {said}; {len(tensors)} tensors are {dtype}: {listed}"


def _description_notes(plan: ConversionPlan) -> Iterator[str]:
    """What config.json and tokenizer_config.json of a release say that those of its source don't."""
    found = describe(plan.hf_folder)
    if not plan.options.keep_config:
        yield from found.notes
        return
    yield "config.json and tokenizer_config.json are the source's bytes (--keep-config)"
    problems = list(found.misread)
    if found.tokenizer != found.stated_tokenizer:
        problems.append("no tokenizer")
    if problems:
        yield f"transformers 4 can't read them, transformers 5 does: it would take {', '.join(problems)}"


def name_of(dtype: torch.dtype) -> str:
    """Its name without `torch.`."""
    return str(dtype).removeprefix("torch.")
