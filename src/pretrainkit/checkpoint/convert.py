"""Conversion between Hugging Face and Megatron-core checkpoints, in any direction, streaming.

Every format gives and takes the Hugging Face tensors of one table row at a time, so any source goes to any
target. Everything that can be refused is refused before the first byte is written, and the target folder
appears complete or not at all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrainkit.checkpoint import hf, nemo_context
from pretrainkit.checkpoint.detect import HF_SOURCE, TRACKER_NAME, Found, Kind, detect
from pretrainkit.checkpoint.hf import HfSource, HfTarget
from pretrainkit.checkpoint.mapping import Entry, expand
from pretrainkit.checkpoint.megatron_args import megatron_args
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.torch_dist import TorchDistSource, TorchDistTarget
from pretrainkit.checkpoint.torch_legacy import CHECKPOINT_VERSION, TorchSource, TorchTarget
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.files import atomic_folder, write_json
from pretrainkit.logs import get_logger
from pretrainkit.models.registry import read_config, read_shape
from pretrainkit.units import format_bytes, format_duration

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEGATRON_VOCABULARY_DIVISOR = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by."""

DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Source(Protocol):
    """Where the weights come from."""

    def dtype(self, entry: Entry) -> torch.dtype: ...
    def read(self, entry: Entry) -> list[Tensor]: ...
    def notes(self) -> list[str]: ...


class Target(Protocol):
    """Where the weights go."""

    parts: list[list[Entry]]

    def write_part(self, part: int, tensors: Iterable[tuple[Entry, Sequence[Tensor]]]) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """How a conversion is done."""

    to: Kind | None = None
    """Target format; by default nemo from Hugging Face, and hf from anything else."""
    hf_folder: Path | None = None
    """Config.json, tokenizer and generation config for a Megatron source that doesn't carry them."""
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
    ignore_config_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    source: str
    source_kind: str
    target: str
    target_kind: str
    shape: ModelShape
    num_tensors: int
    num_bytes: int
    dtypes: dict[str, int]
    """Number of Hugging Face tensors by dtype."""
    elapsed_s: float
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def convert(source: str | Path, target: str | Path, options: Options | None = None) -> Report:
    """Convert the model at `source` to the folder `target`.

    Raises RequestError before anything is written when the request can't be carried out: unknown kind of
    source, architecture or tensor, a shape that doesn't fit, an existing target without `overwrite`.
    """
    options = options or Options()
    started = time.monotonic()
    found, target = detect(Path(source)), Path(target)
    kind = options.to or (Kind.NEMO if found.kind is Kind.HF else Kind.HF)
    hf_folder = _hf_folder(found, options)
    _check_target(target, found, options)
    shape = read_shape(hf_folder, ignore_fields=options.ignore_config_fields)
    options.parallelism.check(shape)
    entries = expand(shape)
    reader = open_source(found, entries, shape)
    dtypes = {entry: _target_dtype(entry, reader.dtype(entry), options.dtype) for entry in entries}
    logger.info("converting %s (%s) to %s (%s)", source, found.kind, target, kind)

    with _replacing(target, options.overwrite) as folder:
        notes = [*_dtype_notes(entries, reader, dtypes), *reader.notes()]
        writer, more = _open_target(kind, folder, entries, dtypes, shape, hf_folder, options)
        _copy(reader, writer, dtypes, options.workers)
        writer.finish()
        report = Report(
            source=str(source),
            source_kind=str(found.kind),
            target=str(target),
            target_kind=str(kind),
            shape=shape,
            num_tensors=sum(len(entry.hf) for entry in entries),
            num_bytes=sum(entry.numel * dtypes[entry].itemsize for entry in entries),
            dtypes=_count_dtypes(entries, dtypes),
            elapsed_s=time.monotonic() - started,
            notes=notes + more,
        )
        if kind is not Kind.HF:
            write_json(
                folder / "conversion.json", {**report.as_dict(), "source": Path(source).name, "target": target.name}
            )
    elapsed_s = time.monotonic() - started
    logger.info("wrote %s in %s", format_bytes(report.num_bytes), format_duration(elapsed_s))
    return report


def open_source(found: Found, entries: Sequence[Entry], shape: ModelShape) -> Source:
    """The reader of a recognised folder; raises unless it holds exactly the model's tensors."""
    if found.kind is Kind.HF:
        return HfSource(found.weights, entries, tied=shape.tie_word_embeddings)
    if found.kind in (Kind.NEMO, Kind.TORCH_DIST):
        return TorchDistSource(found.weights, entries, shape)
    return TorchSource(found.weights, entries, shape)


def _open_target(
    kind: Kind,
    folder: Path,
    entries: Sequence[Entry],
    dtypes: dict[Entry, torch.dtype],
    shape: ModelShape,
    hf_folder: Path,
    options: Options,
) -> tuple[Target, list[str]]:
    """The writer of a format, with what belongs beside the weights already written."""
    if kind is Kind.HF:
        hf.write_config(folder, hf.release_config(read_config(hf_folder), _main_dtype(entries, dtypes)))
        hf.copy_side_files(hf_folder, folder)
        return HfTarget(folder, entries, dtypes, max_shard_bytes=options.max_shard_bytes), []
    if kind is Kind.NEMO:
        carry_hf_files(hf_folder, folder)
        divisor = options.vocabulary_divisor or 1
        dtype = _main_dtype(entries, dtypes)
        nemo_context.write_context(folder / "context", shape, hf_folder, dtype, vocabulary_divisor=divisor)
        (folder / "weights").mkdir()
        padded_rows = padded_vocabulary(shape.vocab_size, divisor, 1)
        writer = TorchDistTarget(
            folder / "weights",
            entries,
            dtypes,
            shape,
            prefix="module.",
            common=nemo_context.common_state(),
            padded_rows=padded_rows,
            num_files=options.workers,
        )
        return writer, _padding_notes(padded_rows - shape.vocab_size)
    return _open_megatron_lm(kind, folder, entries, dtypes, shape, hf_folder, options)


def _open_megatron_lm(
    kind: Kind,
    folder: Path,
    entries: Sequence[Entry],
    dtypes: dict[Entry, torch.dtype],
    shape: ModelShape,
    hf_folder: Path,
    options: Options,
) -> tuple[Target, list[str]]:
    """The writer of one of Megatron-LM's two formats, in `release/` or `iter_NNNNNNN/` beside a tracker file."""
    divisor = options.vocabulary_divisor or MEGATRON_VOCABULARY_DIVISOR
    padded_rows = padded_vocabulary(shape.vocab_size, divisor, options.parallelism.tensor)
    arguments = megatron_args(
        shape,
        options.parallelism,
        padded_vocab_size=padded_rows,
        divisor=divisor,
        dtype=_main_dtype(entries, dtypes),
        format=str(kind),
    )
    common = {
        "args": arguments,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": options.iteration or 0,
        "num_floating_point_operations_so_far": 0,
    }
    name = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
    carry_hf_files(hf_folder, folder)
    (folder / name).mkdir()
    (folder / TRACKER_NAME).write_text(
        "release" if options.iteration is None else str(options.iteration), encoding="ascii"
    )
    notes = _padding_notes(padded_rows - shape.vocab_size)
    if kind is Kind.TORCH:
        return TorchTarget(
            folder / name,
            entries,
            dtypes,
            shape,
            options.parallelism,
            common=common,
            padded_rows=padded_rows,
            num_parts=options.workers,
        ), notes
    return TorchDistTarget(
        folder / name,
        entries,
        dtypes,
        shape,
        prefix="",
        common={**common, "content_metadata": nemo_context.CONTENT_METADATA},
        padded_rows=padded_rows,
        num_files=options.workers,
    ), notes


def carry_hf_files(hf_folder: Path, folder: Path) -> None:
    """Keep the model's config.json and side files with a Megatron checkpoint, for the way back."""
    target = folder / HF_SOURCE
    target.mkdir()
    shutil.copyfile(hf_folder / "config.json", target / "config.json")
    hf.copy_side_files(hf_folder, target)


def _copy(reader: Source, writer: Target, dtypes: dict[Entry, torch.dtype], workers: int) -> None:
    """Stream every part; one part is one file, and one worker writes it."""

    def tensors(part: int) -> Iterator[tuple[Entry, list[Tensor]]]:
        for entry in writer.parts[part]:
            yield entry, [value.to(dtypes[entry]) for value in reader.read(entry)]

    def write(part: int) -> None:
        writer.write_part(part, tensors(part))

    with ThreadPoolExecutor(max_workers=workers) as pool:
        list(pool.map(write, range(len(writer.parts))))


def _hf_folder(found: Found, options: Options) -> Path:
    if found.kind is Kind.HF:
        return found.root
    for folder in (options.hf_folder, found.root / HF_SOURCE, found.weights / HF_SOURCE):
        if folder is not None and (folder == options.hf_folder or folder.is_dir()):
            return folder
    raise RequestError(
        f"a {found.kind} checkpoint that doesn't carry the model's config.json and tokenizer",
        where=str(found.root),
        needed="the Hugging Face folder that the model came from",
        action="add --hf-model FOLDER",
    )


def _check_target(target: Path, found: Found, options: Options) -> None:
    if target.resolve() in (found.root.resolve(), found.weights.resolve()):
        raise RequestError("source and target are the same folder", where=str(target))
    if target.exists() and not target.is_dir():
        raise RequestError("exists and is not a folder", where=str(target))
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        raise RequestError("exists and is not empty", where=str(target), action="choose another folder, or --overwrite")


def _replacing(target: Path, overwrite: bool) -> Any:
    if overwrite and target.is_dir():
        shutil.rmtree(target)
    return atomic_folder(target)


def _target_dtype(entry: Entry, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return dtype if wanted is None or entry.weight.keep_dtype else wanted


def _main_dtype(entries: Sequence[Entry], dtypes: dict[Entry, torch.dtype]) -> torch.dtype:
    """The dtype of most elements."""
    sizes: dict[torch.dtype, int] = {}
    for entry in entries:
        sizes[dtypes[entry]] = sizes.get(dtypes[entry], 0) + entry.numel
    return max(sizes, key=lambda dtype: sizes[dtype])


def _count_dtypes(entries: Sequence[Entry], dtypes: dict[Entry, torch.dtype]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in entries:
        name = str(dtypes[entry]).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + len(entry.hf)
    return counts


def _dtype_notes(entries: Sequence[Entry], reader: Source, dtypes: dict[Entry, torch.dtype]) -> list[str]:
    changes: dict[str, int] = {}
    for entry in entries:
        if reader.dtype(entry) != dtypes[entry]:
            name = f"{reader.dtype(entry)} -> {dtypes[entry]}".replace("torch.", "")
            changes[name] = changes.get(name, 0) + len(entry.hf)
    return [f"{count} tensors cast {change}" for change, count in changes.items()]


def _padding_notes(rows: int) -> list[str]:
    return [f"{rows} padding rows (zeros) added to the vocabulary"] if rows else []
