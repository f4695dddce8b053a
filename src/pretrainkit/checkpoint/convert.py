"""Streaming conversion between Hugging Face and Megatron-core checkpoints, in any direction.

Every reader gives and every writer takes the Hugging Face tensors of one table row at a time, so any format converts to
any other. Requests are refused before the first byte is written, and the target folder appears complete or not at all.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pretrainkit.checkpoint import nonfinite
from pretrainkit.checkpoint.formats.hf_files import (
    HF_SOURCE,
    REPORT_NAME,
    check_no_adapter,
    describe,
    weights_fingerprint,
)
from pretrainkit.checkpoint.formats.megatron_lm import required_flags, run_notes
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping, tensor_mappings
from pretrainkit.checkpoint.open import (
    DetectedCheckpoint,
    WeightReader,
    WeightWriter,
    check_expressible,
    detect,
    open_reader,
    open_writer,
)
from pretrainkit.checkpoint.origin import read_origin, write_origin
from pretrainkit.checkpoint.plan import MEGATRON_LM, CheckpointFormat, ConversionPlan, Options
from pretrainkit.checkpoint.vocabulary import ExtendedReader, plan_extension
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, RequestError, machine_errors
from pretrainkit.files import atomic_folder, nearest_existing, remove_leftovers, write_json
from pretrainkit.logs import get_logger
from pretrainkit.models.hf_config import absent_fields, dtype_of
from pretrainkit.models.registry import family_named, read_config, read_shape
from pretrainkit.units import format_bytes, format_duration

logger = get_logger(__name__)

SPARE_BYTES = 100_000_000
"""Disk space reserved for the other files of a checkpoint (assumed to be ample)."""


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


def convert(source: str | Path | DetectedCheckpoint, target: str | Path, options: Options | None = None) -> Report:
    """Convert the model at `source`, or an average of checkpoints, to the folder `target`.

    Raises RequestError before anything is written when the request is invalid: unknown source format,
    architecture, setting or tensor, wrong shape, existing target without `overwrite`, full disk.
    """
    options = options or Options()
    started = time.monotonic()
    found, target = source if isinstance(source, DetectedCheckpoint) else detect(Path(source)), Path(target)
    format = options.to or default_target(found.format)
    _check_target(target, found, options)
    hf_folder = find_hf_folder(found, options.hf_folder)
    shape = read_shape(hf_folder, ignore_fields=options.ignore_config_fields)
    options.parallelism.check(shape)
    mappings = tensor_mappings(shape)
    reader, origin = open_reader(found, mappings, shape), read_origin(found)
    if options.new_tokens:
        extension = plan_extension(hf_folder, shape, options.new_tokens)
        reader = ExtendedReader(reader, extension)
        hf_folder, shape, mappings = extension.hf_folder, extension.shape, list(reader.dtypes)
        origin = [*origin, extension.step]
    dtypes = {
        mapping: dtype if mapping.weight.keep_dtype else options.dtype or dtype
        for mapping, dtype in reader.dtypes.items()
    }
    is_changed = bool(found.average or options.new_tokens or dtypes != reader.dtypes)
    is_copy = found.format is CheckpointFormat.HF and not is_changed
    plan = ConversionPlan(format, shape, mappings, dtypes, hf_folder, options, reader.run_state)
    check_expressible(shape, format)
    _check_kept_config(plan)
    _check_space(target, plan.num_bytes)
    if left := remove_leftovers(target):
        logger.warning("left by other processes, to be removed unless they still run: %s", ", ".join(map(str, left)))
    logger.info("converting %s (%s) to %s (%s)", source, found.kind, target, format)
    explained = machine_errors(target, "nothing was left behind; try again", CheckpointError)
    with explained, atomic_folder(target, replace=options.overwrite) as folder:
        writer = open_writer(folder, plan)
        problems = _copy(reader, writer, plan)
        if problems and not options.allow_nonfinite:
            raise CheckpointError(
                f"values that aren't finite in {_list(problems)}",
                where=str(source),
                needed="finite weights" + (" in this dtype" if options.dtype else ""),
                action="use an earlier checkpoint, or convert them as they are: --allow-nonfinite",
            )
        writer.finish()
        report = Report(
            source=str(source),
            source_kind=found.kind,
            target=str(target),
            target_kind=str(format),
            shape=shape,
            num_tensors=sum(len(mapping.hf) for mapping in mappings),
            num_bytes=plan.num_bytes,
            dtypes=dict(Counter(_name(dtype) for mapping, dtype in dtypes.items() for _ in mapping.hf)),
            elapsed_s=round(time.monotonic() - started, 3),
            source_fingerprint=weights_fingerprint(found.root) if is_copy else None,
            notes=[*_notes(reader, plan), *([f"not finite: {_list(problems)}"] if problems else [])],
        )
        if format is not CheckpointFormat.HF:
            # Names only: a checkpoint may be published, and paths reveal details of the machine.
            write_json(
                folder / REPORT_NAME, {**asdict(report), "source": Path(str(source)).name, "target": target.name}
            )
        write_origin(folder, origin)
    elapsed_s = time.monotonic() - started
    logger.info("wrote %s in %s", format_bytes(report.num_bytes), format_duration(elapsed_s))
    return report


def default_target(source: CheckpointFormat) -> CheckpointFormat:
    """The format that a source is converted to by default."""
    return CheckpointFormat.NEMO if source is CheckpointFormat.HF else CheckpointFormat.HF


def find_hf_folder(found: DetectedCheckpoint, given: Path | None = None) -> Path:
    """The folder with the config.json, tokenizer and generation config of a model.

    Raises RequestError when a Megatron checkpoint doesn't carry one and none is given.
    """
    if given is not None:
        check_no_adapter(given)
        return given
    if found.format is CheckpointFormat.HF:
        return found.root
    for folder in (found.root / HF_SOURCE, found.weights / HF_SOURCE):
        if folder.is_dir():
            check_no_adapter(folder)
            return folder
    raise RequestError(
        f"a {found.format} checkpoint that doesn't carry the model's config.json and tokenizer",
        where=str(found.root),
        needed="the Hugging Face folder that the model came from",
        action="add --hf-model FOLDER",
    )


def _copy(reader: WeightReader, writer: WeightWriter, plan: ConversionPlan) -> list[str]:
    """Stream all parts, one per worker at a time, with a progress bar on a terminal.

    Gives the tensors with values that aren't finite, padding rows included, and how many those are.
    """
    from tqdm import tqdm

    problems = []
    with tqdm(
        total=plan.num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="weights",
        disable=not sys.stderr.isatty(),
    ) as progress:

        def values(part: int) -> Iterator[tuple[TensorMapping, list[LazyTensor]]]:
            for mapping in writer.parts[part]:
                dtype, watch = plan.dtypes[mapping], nonfinite.Watch()
                tensors = [replace(value.to(dtype), watch=watch) for value in reader.read(mapping)]
                yield mapping, tensors
                progress.update(mapping.numel * dtype.itemsize)
                checked = dict(zip(mapping.hf, tensors, strict=True)) if watch.found else {}
                if padding := reader.padding(mapping):
                    checked[f"padding rows of {mapping}"] = padding
                for name, value in checked.items():
                    if counts := nonfinite.describe(value.tensor()):
                        problems.append(f"{name} ({counts})")

        with ThreadPoolExecutor(max_workers=plan.options.workers) as pool:
            for _ in pool.map(lambda part: writer.write_part(part, values(part)), range(len(writer.parts))):
                pass
    return sorted(problems)


def _list(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_target(target: Path, found: DetectedCheckpoint, options: Options) -> None:
    sources = [parent.checkpoint for parent in found.average.parents] if found.average else [found]
    if target.resolve() in {folder.resolve() for each in sources for folder in (each.root, each.weights)}:
        raise RequestError("source and target are the same folder", where=str(target))
    if target.exists() and not target.is_dir():
        raise RequestError("exists and is not a folder", where=str(target))
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        raise RequestError("exists and is not empty", where=str(target), action="choose another folder, or --overwrite")


def _check_kept_config(plan: ConversionPlan) -> None:
    """Raise RequestError when --keep-config would release a config.json that states another dtype than the weights'."""
    if not plan.options.keep_config:
        return
    if plan.format is not CheckpointFormat.HF:
        raise RequestError(
            f"config.json of a Hugging Face folder, and the target is {plan.format}",
            where="--keep-config",
            action="leave it out: a Megatron checkpoint carries the model's files as they are",
        )
    if plan.options.new_tokens:
        raise RequestError("config.json and tokenizer change with --add-tokens", where="--keep-config")
    stated, written = dtype_of(read_config(plan.hf_folder)), _name(plan.main_dtype)
    if stated != written:
        raise RequestError(
            f"config.json says {stated or 'no dtype'}, the weights are {written}",
            where="--keep-config",
            needed="a config.json that states the dtype of the weights",
            action="leave out --keep-config" + (f", or cast the weights: --dtype {stated}" if stated else ""),
        )


def _check_space(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(nearest_existing(target)).free
    if free < num_bytes + SPARE_BYTES:
        raise RequestError(
            f"{format_bytes(free)} free on the disk", where=str(target), needed=format_bytes(num_bytes + SPARE_BYTES)
        )


def _notes(reader: WeightReader, plan: ConversionPlan) -> Iterator[str]:
    """What was cast, left out or added, and what Megatron-LM needs as options."""
    changes = Counter(
        f"{_name(reader.dtypes[mapping])} to {_name(dtype)}"
        for mapping, dtype in plan.dtypes.items()
        for _ in mapping.hf
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
        if _name(dtype) != stated and not mapping.weight.keep_dtype:
            names.setdefault(_name(dtype), []).extend(mapping.hf)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
