"""What can be seen of a dataset without training on it: its form and amount, its documents, and where it lies."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import psutil

from pretrainkit.diagnosis.checks import NOTED, Check, rated, warning
from pretrainkit.errors import DataError, RequestError
from pretrainkit.units import format_bytes, format_count

LOOKED_AT_BYTES = 64 << 20
SMALL_FILE_BYTES, MANY_FILES, MOST_FILES = 1 << 20, 1000, 200_000
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")
PARALLEL_FILE_SYSTEMS = ("lustre", "gpfs", "beegfs", "ceph", "fuse.ceph")


def check_data(path: str) -> list[Check]:
    """A dataset: its format, how much there is, how documents begin and end, and where it lies."""
    place = Path(path).expanduser()
    try:
        checks = _format_checks(place)
    except (DataError, RequestError) as error:
        checks = [warning("data", str(error))]
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
            rated("padding in the data", padding >= 0.05, f"{padding:.1%} of the tokens"),
        ]
    if is_shard_folder(place):
        shards = open_shards(place)
        return [_amount("WebDataset token shards", shards.num_samples, "samples", shards.num_tokens)]
    if place.is_dir() and not any(place.glob("*.idx")):
        endings = sorted({path.suffix or "no ending" for path in place.rglob("*") if path.is_file()})
        found = f"a folder of {', '.join(endings) or 'nothing'}: no prepared token ids"
        return [warning("data format", found, "tools/preprocess_data.py or tools/pack_dataset.py prepares them once")]
    if place.is_file() and place.suffix not in (".bin", ".idx"):
        has_lines = place.suffix in (".jsonl", ".json", ".txt")
        rows = [Check("amount of data", NOTED, _count_lines(place))] if has_lines else []
        found = f"{place.name}: text, {format_bytes(place.stat().st_size)}; it must be tokenized while training"
        return [*rows, warning("data format", found, "tools/preprocess_data.py makes .bin/.idx of it once")]
    return [_pairs(place)]


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


def _pairs(place: Path) -> Check:
    from pretrainkit.data.indexed.format import IndexedDataset
    from pretrainkit.data.indexed.pair_set import find_pairs

    pairs = [IndexedDataset(prefix) for prefix in find_pairs(place)]
    documents = sum(pair.num_documents for pair in pairs)
    return _amount(".bin/.idx token ids", documents, "documents", sum(pair.num_tokens for pair in pairs))


def _amount(form: str, rows: int, unit: str, tokens: int) -> Check:
    return Check("amount of data", NOTED, f"{form}: {format_count(rows)} {unit}, {format_count(tokens)} tokens")


def check_place(place: Path) -> list[Check]:
    """The file system that data lies on, and whether it is cut into too many small files."""
    kind = file_system(place)
    found = f"{place} lies on {kind}"
    if kind in PARALLEL_FILE_SYSTEMS:
        checks = [Check("file system", NOTED, f"{found}: large files want striping (lfs setstripe -c 8)")]
    else:
        is_slow = kind in NETWORK_FILE_SYSTEMS
        checks = [rated("file system", is_slow, found, "copy it to a local or parallel file system")]
    if place.is_dir():
        paths = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
        sizes = [path.stat().st_size for path in islice(filter(Path.is_file, paths), MOST_FILES)]
        small = sum(size < SMALL_FILE_BYTES for size in sizes)
        found = f"{len(sizes)} files, {small} of them under 1 MiB, {format_bytes(sum(sizes))} in all"
        checks.append(rated("number of files", small > MANY_FILES, found, "join them: token shards or .bin/.idx"))
    return checks


def file_system(place: Path) -> str:
    """The type of the file system that a path lies on, such as ext4, lustre or nfs4."""
    real = place.resolve()
    around = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    # Of two that are mounted in one place the later one is seen.
    return max(reversed(around), key=lambda mount: len(mount.mountpoint)).fstype if around else "unknown"
