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
from dataclasses import asdict, replace
from pathlib import Path

from pretrainkit.checkpoint import existing, nonfinite
from pretrainkit.checkpoint.formats.carried import carried_tensors
from pretrainkit.checkpoint.formats.hf_files import (
    HF_SOURCE,
    REPORT_NAME,
    check_no_adapter,
    weights_fingerprint,
)
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
from pretrainkit.checkpoint.plan import CheckpointFormat, ConversionPlan, Options
from pretrainkit.checkpoint.report import Report, name_of, notes_of
from pretrainkit.checkpoint.vocabulary import ExtendedReader, plan_extension
from pretrainkit.errors import CheckpointError, RequestError, machine_errors
from pretrainkit.files import atomic_folder, nearest_existing, remove_leftovers, staging_folder, write_json
from pretrainkit.logs import get_logger
from pretrainkit.models.hf_config import dtype_of
from pretrainkit.models.registry import read_config, read_shape
from pretrainkit.units import format_bytes, format_duration

logger = get_logger(__name__)

SPARE_BYTES = 100_000_000
"""Disk space reserved for the other files of a checkpoint (assumed to be ample)."""


def convert(source: str | Path | DetectedCheckpoint, target: str | Path, options: Options | None = None) -> Report:
    """Convert the model at `source`, or an average of checkpoints, to the folder `target`.

    A target that exists is left as it is, and without `overwrite` must be what would be written: that is converted
    and compared.

    Raises RequestError before anything is written when the request is invalid: unknown source format,
    architecture, setting or tensor, wrong shape, another target that exists, full disk.
    """
    options = options or Options()
    started = time.monotonic()
    found, target = source if isinstance(source, DetectedCheckpoint) else detect(Path(source)), Path(target)
    format = options.to or default_target(found.format)
    if is_there := _is_there(target, found, options):
        options = existing.with_files_of(target, options)
    hf_folder = find_hf_folder(found, options.hf_folder)
    shape = read_shape(hf_folder, ignore_fields=options.ignore_config_fields)
    options.parallelism.check(shape)
    carried = carried_tensors(found.root if found.format is CheckpointFormat.HF else hf_folder)
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
    plan = ConversionPlan(format, shape, mappings, dtypes, hf_folder, options, reader.run_state, carried)
    check_expressible(shape, format)
    _check_kept_config(plan)
    if is_there:
        existing.check_weights(target, reader, plan, origin)
    _check_space(target, plan.num_bytes, "the target exists: comparing takes as much as converting" if is_there else "")
    if left := remove_leftovers(target):
        logger.warning("left by other processes, to be removed unless they still run: %s", ", ".join(map(str, left)))
    purpose = ", to compare it with what is there" if is_there else ""
    logger.info("converting %s (%s) to %s (%s)%s", source, found.kind, target, format, purpose)
    explained = machine_errors(target, "nothing was left behind; try again", CheckpointError)
    new_folder = staging_folder(target) if is_there else atomic_folder(target, replace=options.overwrite)
    with explained, new_folder as folder:
        writer = open_writer(folder, plan)
        if is_there:
            existing.check_files(target, folder, is_complete=False)
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
            num_tensors=sum(mapping.num_tensors for mapping in mappings),
            num_bytes=plan.num_bytes,
            dtypes=dict(Counter(name_of(dtypes[mapping]) for mapping in mappings for _ in range(mapping.num_tensors))),
            elapsed_s=round(time.monotonic() - started, 3),
            workers=options.workers,
            source_fingerprint=weights_fingerprint(found.root) if is_copy else None,
            notes=[*notes_of(reader, plan), *([f"not finite: {_list(problems)}"] if problems else [])],
        )
        if format is not CheckpointFormat.HF:
            # Names only: a checkpoint may be published, and paths reveal details of the machine.
            write_json(
                folder / REPORT_NAME, {**asdict(report), "source": Path(str(source)).name, "target": target.name}
            )
        write_origin(folder, origin)
        if is_there:
            existing.check_files(target, folder, is_complete=True)
            logger.info("already there, equal in every byte: nothing was changed")
            return replace(report, notes=[*report.notes, "already there"])
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
                checked = dict(zip(mapping.part_names, tensors, strict=True)) if watch.found else {}
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


def _is_there(target: Path, found: DetectedCheckpoint, options: Options) -> bool:
    """Whether there is a target that isn't to be replaced. Raises RequestError for one that can't be a target."""
    sources = [parent.checkpoint for parent in found.average.parents] if found.average else [found]
    if target.resolve() in {folder.resolve() for each in sources for folder in (each.root, each.weights)}:
        raise RequestError("source and target are the same folder", where=str(target))
    if target.exists() and not target.is_dir():
        raise RequestError("exists and is not a folder", where=str(target))
    return target.is_dir() and any(target.iterdir()) and not options.overwrite


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
    stated, written = dtype_of(read_config(plan.hf_folder)), name_of(plan.main_dtype)
    if stated != written:
        raise RequestError(
            f"config.json says {stated or 'no dtype'}, the weights are {written}",
            where="--keep-config",
            needed="a config.json that states the dtype of the weights",
            action="leave out --keep-config" + (f", or cast the weights: --dtype {stated}" if stated else ""),
        )


def _check_space(target: Path, num_bytes: int, reason: str) -> None:
    free = shutil.disk_usage(nearest_existing(target)).free
    if free < num_bytes + SPARE_BYTES:
        needed = format_bytes(num_bytes + SPARE_BYTES)
        raise RequestError(
            f"{format_bytes(free)} free on the disk",
            where=str(target),
            needed=f"{needed} ({reason})" if reason else needed,
        )
