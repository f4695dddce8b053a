"""Builds a packed dataset: the data engine encodes documents, which are then packed and written as Arrow files."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pretrainkit import files
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.indexed.build import preprocess_with
from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.data.indexed.manifest import Manifest, made_now, read_manifest
from pretrainkit.data.indexed.request import Request
from pretrainkit.data.names import PACKED_RECORD
from pretrainkit.data.packed.format import DOCUMENTS, PackedFile, PackedManifest
from pretrainkit.data.packed.once import build_once
from pretrainkit.data.packed.packing import Packing, pack
from pretrainkit.data.packed.request import HUB, PackPlan
from pretrainkit.data.tokens.encode_pool import EncodePool
from pretrainkit.errors import DataError, RequestError, machine_errors
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
FILE_BYTES = 512 << 20
"""Ids in an Arrow file, at most."""


def pack_dataset(plan: PackPlan, *, timeout_s: float = 24 * 3600.0) -> tuple[PackedManifest, bool]:
    """Make sure that the set exists; gives its manifest, and whether this process built it.

    May be called by all processes of a distributed run at once (see `pretrainkit.data.packed.once`). Raises
    DataError when an input is bad, StoppedError (exit code 85) on SIGTERM; the next call continues what is unfinished.
    """
    made: list[bool] = []
    pool = EncodePool(plan.machine.num_proc)

    def build() -> None:
        with stopped_by_signals("run the same command again: it continues from there"):
            made.append(_prepare(plan, pool))

    build_once(
        plan.request.output_dir,
        lambda: plan.finished() is not None,
        build,
        leftovers=lambda: _unfinished(plan),
        pool=pool,
        timeout_s=timeout_s,
    )
    manifest = plan.finished()
    assert manifest is not None
    return manifest, made == [True]


def _unfinished(plan: PackPlan) -> list[Path]:
    """Folders of unfinished work, of this request or another with the same output."""
    final = plan.request.output_dir
    return [*files.leftovers(final), *final.parent.glob(f"{final.name}.staging-*")]


def _prepare(plan: PackPlan, pool: EncodePool) -> bool:
    """Build the set; False when it exists and its inputs were touched but have the same content."""
    began = time.monotonic()
    final = plan.request.output_dir
    if found := plan.touched():
        ready, inputs = found
        files.write_json(final / PACKED_RECORD, replace(ready, inputs=inputs).to_json())
        LOGGER.info("%s was made of inputs with the same content", final)
        return False
    for old in _unfinished(plan):
        if old != plan.staging:
            shutil.rmtree(old, ignore_errors=True)
    plan.staging.mkdir(parents=True, exist_ok=True)
    LOGGER.info("%s", plan.machine.origins)
    prefix, documents = _encode(plan, pool)
    pair = IndexedDataset(prefix)
    packing = pack(pair.sequence_lengths, plan.request.sequence_length, plan.request.packing)
    if not packing.num_sequences:
        raise DataError(
            f"{documents.num_tokens} tokens are less than a sequence",
            where=str(final),
            needed=f"at least {plan.request.sequence_length} tokens",
            action="give a smaller --sequence_length, or more input",
        )
    manifest = _write_set(plan, packing, pair, documents, began)
    shutil.rmtree(plan.staging, ignore_errors=True)
    LOGGER.info("%s: %s, %s", final, manifest.summary, format_duration(manifest.elapsed_s))
    return True


def _write_set(
    plan: PackPlan, packing: Packing, pair: IndexedDataset, documents: Manifest, began: float
) -> PackedManifest:
    final = plan.request.output_dir
    again = f"fix it and run the same command again: encoded documents are kept in {plan.staging}"
    with machine_errors(final, again), files.atomic_folder(final, replace=final.exists()) as folder:
        written = _write_files(plan, packing, pair, folder)
        if plan.request.packing == "concat":
            np.save(folder / DOCUMENTS, _lengths_within(pair.sequence_lengths, packing.num_tokens))
        manifest = _manifest(plan, packing, documents, written, time.monotonic() - began)
        if plan.request.packing == "concat":
            manifest = replace(manifest, lengths_xxh3_128=files.hash_file(folder / DOCUMENTS, xxhash.xxh3_128))
        _write_hugging_face_records(manifest.fingerprint, folder, [entry.name for entry in written])
        rejects = plan.staging / "documents.rejects.jsonl"
        if rejects.is_file():
            shutil.copyfile(rejects, folder / "rejects.jsonl")
        files.write_json(folder / PACKED_RECORD, manifest.to_json())
    return manifest


def _encode(plan: PackPlan, pool: EncodePool) -> tuple[Path, Manifest]:
    """The documents as a .bin/.idx pair in the staging folder, encoded now or by an earlier process."""
    request = plan.request
    prefix = plan.staging / f"documents_{request.text_column}_document"
    done = read_manifest(prefix)
    if done is not None:
        LOGGER.info("documents are encoded already")
        return prefix, done
    # Files without a manifest were left by a process that died while it committed them.
    options = request.text_options() | {"overwrite": True}
    (manifest,) = preprocess_with(
        pool,
        Request(
            inputs=_local_inputs(plan),
            output_prefix=str(plan.staging / "documents"),
            tokenizer_model=request.tokenizer_model,
            json_keys=(request.text_column,),
            workers=plan.machine.num_proc,
            **options,
        ),
        plan.tokenizer,
    )
    return prefix, manifest


def _local_inputs(plan: PackPlan) -> tuple[str, ...]:
    request = plan.request
    if not request.inputs[0].startswith(HUB):
        return request.inputs
    import datasets

    name = request.inputs[0].removeprefix(HUB)
    try:
        loaded = datasets.load_dataset(name, split=request.hub_split, revision=request.hub_revision)
    except Exception as error:  # the hub's client raises errors of many types
        raise RequestError(
            f"can't be loaded from the hub: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=request.inputs[0],
            action="check its name and the network, or save it to disk elsewhere and name that folder",
        ) from error
    return tuple(entry["filename"] for entry in loaded.cache_files)


def _write_files(plan: PackPlan, packing: Packing, pair: IndexedDataset, folder: Path) -> list[PackedFile]:
    import pyarrow as pa

    batch, rows = plan.machine.batch_size, plan.machine.writer_batch_size
    per_file = max(1, FILE_BYTES // (4 * packing.sequence_length))
    num_files = -(-packing.num_sequences // per_file)
    ids_type = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", ids_type), ("document_lengths", ids_type)])
    progress = ByteProgress(packing.num_sequences, "pack", unit="sequences")
    written = []
    for number in range(num_files):
        path = folder / f"data-{number:05d}-of-{num_files:05d}.arrow"
        begin, end = number * per_file, min((number + 1) * per_file, packing.num_sequences)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for first in range(begin, end, batch):
                last = min(first + batch, end)
                ids = packing.sequences(pair.tokens, first, last, plan.tokenizer.eod_id or 0)
                for row in range(first, last, rows):
                    writer.write_batch(_record_batch(pa, schema, packing, ids[row - first :][:rows], row))
                pair.release()
                progress.add(last - first)
        digest = files.hash_file(path, xxhash.xxh3_128)
        written.append(PackedFile(path.name, path.stat().st_size, digest, end - begin))
    progress.close()
    return written


def _record_batch(pa: Any, schema: Any, packing: Packing, ids: NDArray[np.int32], first: int) -> Any:
    count, length = ids.shape
    pieces = packing.first_piece[first : first + count + 1]
    columns = [
        _lists(pa, np.arange(0, (count + 1) * length, length, dtype=np.int32), ids.reshape(-1)),
        _lists(pa, (pieces - pieces[0]).astype(np.int32), packing.lengths[pieces[0] : pieces[-1]]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lists(pa: Any, offsets: NDArray[np.int32], values: NDArray[np.int32]) -> Any:
    """A column of lists over these very arrays: `pa.array` would import pandas to ask whether they are of it."""
    items = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    lists = pa.list_(pa.int32())
    return pa.Array.from_buffers(lists, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[items])


def _lengths_within(lengths: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
    """Lengths of the documents in the first `num_tokens` of their stream; the last may be cut."""
    ends = np.minimum(np.cumsum(lengths, dtype=np.int64), num_tokens)
    kept = np.diff(ends, prepend=0).astype(np.int32)
    return kept[kept > 0]


def _write_hugging_face_records(fingerprint: str, folder: Path, names: list[str]) -> None:
    """Write what `datasets.load_from_disk` looks for; it takes the columns' types from the Arrow files."""
    files.write_json(folder / "dataset_info.json", {"description": "Made by pretrainkit.", "citation": ""})
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    files.write_json(folder / "state.json", state)


def _manifest(
    plan: PackPlan, packing: Packing, documents: Manifest, written: list[PackedFile], elapsed_s: float
) -> PackedManifest:
    inputs = plan.inputs
    if inputs:  # the data engine has hashed what it read
        hashes = [entry.xxh3_128 for entry in documents.inputs]
        inputs = tuple(replace(state, xxh3_128=found) for state, found in zip(inputs, hashes, strict=True))
    return PackedManifest(
        fingerprint=plan.fingerprint(inputs),
        settings=plan.settings,
        inputs=inputs,
        sequence_length=packing.sequence_length,
        packing=plan.request.packing,
        num_sequences=packing.num_sequences,
        num_tokens=packing.num_tokens,
        num_padding=packing.num_padding,
        num_dropped=packing.num_dropped,
        padding_id=plan.tokenizer.eod_id or 0,
        documents=asdict(documents),
        tokenizer=documents.tokenizer,
        files=tuple(written),
        **made_now(elapsed_s),
    )
