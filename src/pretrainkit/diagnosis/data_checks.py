"""What can be seen of a dataset without training on it: its form and amount, its documents, and where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit.diagnosis.checks import FINE, TOLD, WARN, Check
from pretrainkit.errors import DataError, RequestError
from pretrainkit.units import format_bytes, format_count

LOOKED_AT_DOCUMENTS = 2000
LOOKED_AT_BYTES = 64 << 20
SMALL_FILE_BYTES, MANY_FILES = 1 << 20, 1000
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")
PARALLEL_FILE_SYSTEMS = ("lustre", "gpfs", "beegfs", "ceph", "fuse.ceph")


def check_data(path: str) -> list[Check]:
    """A dataset: its format, how much there is, how documents begin and end, and where it lies."""
    place = Path(path).expanduser()
    try:
        checks = _format_checks(place)
    except (DataError, RequestError) as error:
        checks = [Check("data", WARN, str(error))]
    return [*checks, *check_place(place if place.exists() else place.parent)]


def _format_checks(place: Path) -> list[Check]:
    from pretrainkit.data.packed.format import is_packed_folder, read_packed_manifest
    from pretrainkit.data.shards.shard_set import is_shard_folder, open_shards

    if is_packed_folder(place):
        record = read_packed_manifest(place)
        assert record
        padding = record.num_padding / max(record.num_tokens + record.num_padding, 1)
        return [
            _amount("packed Arrow", record.num_sequences, "sequences", record.num_tokens),
            Check("padding in the data", FINE if padding < 0.05 else WARN, f"{padding:.1%} of the tokens"),
        ]
    if is_shard_folder(place):
        shards = open_shards(place)
        return [_amount("WebDataset token shards", shards.num_samples, "samples", shards.num_tokens)]
    if place.is_dir() and not any(place.glob("*.idx")):
        return [_raw_folder(place)]
    if place.is_file() and place.suffix not in (".bin", ".idx"):
        rows = _count_lines(place) if place.suffix in (".jsonl", ".json", ".txt") else None
        return [
            *([Check("amount of data", TOLD, rows)] if rows else []),
            Check(
                "data format",
                WARN,
                f"{place.name}: text, {format_bytes(place.stat().st_size)}; it must be tokenized while training",
                "tools/preprocess_data.py makes .bin/.idx of it once",
            ),
        ]
    return _pair_checks(place)


def _count_lines(path: Path) -> str:
    """The lines of a text file, of a long one estimated from its beginning."""
    size = path.stat().st_size
    with path.open("rb") as file:
        looked = file.read(LOOKED_AT_BYTES)
    lines = looked.count(b"\n")
    if len(looked) == size:
        return f"text: {format_count(lines)} rows"
    rows = format_count(round(lines * size / len(looked)))
    return f"text: about {rows} rows (from its first {format_bytes(len(looked))})"


def _raw_folder(folder: Path) -> Check:
    endings = sorted({path.suffix or "no ending" for path in folder.rglob("*") if path.is_file()})
    return Check(
        "data format",
        WARN,
        f"a folder of {', '.join(endings) or 'nothing'}: no prepared token ids",
        "tools/preprocess_data.py or tools/pack_dataset.py prepares them once",
    )


def _pair_checks(place: Path) -> list[Check]:
    from pretrainkit.data.indexed.format import IndexedDataset, find_pairs
    from pretrainkit.data.indexed.manifest import read_manifest

    checks, tokens, documents = [], 0, 0
    for prefix in find_pairs(place):
        dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
        tokens, documents = tokens + dataset.num_tokens, documents + dataset.num_documents
        eod = manifest.tokenizer.eod_id if manifest else None
        bos = manifest.tokenizer.bos_id if manifest else None
        looked = [dataset.document(int(number)) for number in _spread(dataset.num_documents)]
        checks += _document_ends(prefix.name, looked, eod, bos)
    return [_amount(".bin/.idx token ids", documents, "documents", tokens), *checks]


def _document_ends(name: str, documents: list[Any], eod: int | None, bos: int | None) -> list[Check]:
    """Whether documents end with EOD and begin with one BOS at most."""
    documents = [ids for ids in documents if len(ids)]
    checks = []
    if eod is None:
        last = [int(ids[-1]) for ids in documents]
        eod = (
            max(set(last), key=last.count) if last and last.count(max(set(last), key=last.count)) == len(last) else None
        )
        if eod is None:
            checks.append(
                Check("ends of documents", WARN, f"{name}: documents end with different tokens: no EOD", "--append-eod")
            )
    else:
        missing = sum(int(ids[-1]) != eod for ids in documents)
        found = f"{name}: {missing} of {len(documents)} documents that were looked at don't end with EOD ({eod})"
        checks.append(Check("ends of documents", WARN if missing else FINE, found, "--append-eod" if missing else ""))
    twice = sum(len(ids) > 1 and bos is not None and int(ids[0]) == int(ids[1]) == bos for ids in documents)
    if twice:
        checks.append(
            Check("BOS", WARN, f"{name}: {twice} documents begin with two BOS", "take BOS out of the text, or --no-bos")
        )
    return checks


def _spread(count: int) -> Iterable[int]:
    if not count:
        return []
    return np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT_DOCUMENTS)).astype(int)).tolist()


def _amount(form: str, rows: int, unit: str, tokens: int) -> Check:
    return Check("amount of data", TOLD, f"{form}: {format_count(rows)} {unit}, {format_count(tokens)} tokens")


def check_place(place: Path) -> list[Check]:
    """The file system that data lies on, and whether it is cut into too many small files."""
    kind = file_system(place)
    checks = []
    if kind in NETWORK_FILE_SYSTEMS:
        checks.append(
            Check("file system", WARN, f"{place} lies on {kind}", "copy it to a local or parallel file system")
        )
    elif kind in PARALLEL_FILE_SYSTEMS:
        checks.append(
            Check("file system", TOLD, f"{place} lies on {kind}: large files want striping (lfs setstripe -c 8)")
        )
    else:
        checks.append(Check("file system", FINE, f"{place} lies on {kind}"))
    if place.is_dir():
        sizes = [entry.stat().st_size for entry in _files(place)]
        small = sum(size < SMALL_FILE_BYTES for size in sizes)
        many = small > MANY_FILES
        found = f"{len(sizes)} files, {small} of them under 1 MiB, {format_bytes(sum(sizes))} in all"
        checks.append(
            Check(
                "number of files", WARN if many else FINE, found, "join them: token shards or .bin/.idx" if many else ""
            )
        )
    return checks


def _files(folder: Path, most: int = 200_000) -> Iterable[os.DirEntry[str]]:
    waiting, seen = [str(folder)], 0
    while waiting and seen < most:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file():
                    seen += 1
                    yield entry


def file_system(place: Path) -> str:
    """The type of the file system that a path lies on, such as ext4, lustre or nfs4."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    real = str(place.resolve())
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind
