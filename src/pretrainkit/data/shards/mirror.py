"""Copies of shards behind URLs on a local disk: a training run draws samples from all of them, in any order.

Each shard is copied and checked against the hash in its record before it gets its name, once per file system
however many processes ask. An interrupted copy resumes with the missing shards.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from pretrainkit import files
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.packed.once import build_once
from pretrainkit.data.shards.format import shard_name
from pretrainkit.data.shards.shard_set import Shard, ShardSet, open_shards, shard_damage
from pretrainkit.data.shards.urls import ATTEMPTS, READ_BYTES, is_url
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger
from pretrainkit.units import format_bytes

LOGGER = get_logger(__name__)
AT_ONCE = 4
"""Shards that are copied concurrently."""


def local_shards(name: str, cache: Path) -> str:
    """A path of the shards on a disk: `name` itself, or for a URL a copy in `cache`, which is made if it is missing.

    Raises RequestError when there are no such shards, DataError when they can't be copied.
    """
    if not is_url(name):
        return name
    shards = open_shards(name)
    folder = cache / shards.data_hash[:16]
    build_once(folder, lambda: not _missing(shards, folder), lambda: _copy(shards, folder))
    return str(folder / "shard-*.tar")


def _missing(shards: ShardSet, folder: Path) -> list[Shard]:
    def is_there(shard: Shard) -> bool:
        name = shard_name(shard.record.shard_id)
        return (folder / f"{name}.json").is_file() and not shard_damage(folder / f"{name}.tar", shard.record)

    return [shard for shard in shards.shards if not is_there(shard)]


def _copy(shards: ShardSet, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing(shards, folder)
    for left in folder.glob(f"*{files.TEMPORARY_MARK}*"):  # by a killed copy; this process holds the lock
        left.unlink(missing_ok=True)
    wanted, free = sum(shard.record.tar_bytes for shard in missing), shutil.disk_usage(folder).free
    if wanted > free:
        raise DataError(
            f"{format_bytes(free)} free, the shards need {format_bytes(wanted)}",
            where=str(folder),
            action="free disk space, or give another folder with --shard_cache; shards without text are smaller",
        )
    LOGGER.info("copying %d shards, %s, to %s", len(missing), format_bytes(wanted), folder)
    progress = ByteProgress(wanted, "copy")
    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for shard in threads.map(lambda shard: _copy_shard(shard, folder), missing):
                progress.add(shard.record.tar_bytes)
    finally:
        progress.close()


def _copy_shard(shard: Shard, folder: Path) -> Shard:
    name = shard_name(shard.record.shard_id)
    problem: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            with files.atomic_file(folder / f"{name}.tar") as temporary:
                _stream(shard, temporary)
            with files.atomic_file(folder / f"{name}.samples") as temporary:
                temporary.write_bytes(shard.table.tobytes())
            files.write_json(folder / f"{name}.json", shard.record.to_json())
            return shard
        except (OSError, DataError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # this disk's
                raise
            problem = error
    raise DataError(f"can't be copied: {problem}", where=shard.url, action="check the server, and start again")


def _stream(shard: Shard, target: Path) -> None:
    from webdataset.gopen import gopen

    digest, num_bytes = xxhash.xxh3_128(), 0
    with gopen(shard.url, "rb") as stream, target.open("wb") as file:
        while data := stream.read(READ_BYTES):
            digest.update(data)
            num_bytes += len(data)
            file.write(data)
    if digest.hexdigest() != shard.record.tar_xxh3_128:
        raise DataError(
            f"{num_bytes} bytes that are not those of its record ({shard.record.tar_bytes} bytes)", where=shard.url
        )
