"""Which .bin/.idx pairs a path means, and whether they are all of their documents, each once.

A pair may be a part of a set: of what the tasks of an array make (`--shard`), or the runs with `--per-file`. Its
manifest says so (`SetPart`); of parts without one, or of older versions, the name does.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.data.indexed.format import bin_path, idx_path
from pretrainkit.data.indexed.manifest import Manifest, SetPart, read_manifest
from pretrainkit.data.names import PACKED_RECORD, SHARD_FILE, UNFINISHED_FOLDER
from pretrainkit.data.readers.inputs import natural_key
from pretrainkit.errors import DataError, RequestError
from pretrainkit.files import check_utf8
from pretrainkit.units import format_ranges

SHARD_NAME = re.compile(r"\.shard-(\d+)-of-(\d+)(?=_)")


def find_pairs(path: Path | str) -> list[Path]:
    """The prefixes of all pairs at `path`, in natural order: a prefix, one of its files, or a folder.

    A folder means all pairs in it and below. Raises RequestError when there is none, half of one, a part of a set
    without the others, documents in two pairs, or pairs next to data of another form; see `check_sets`.
    """
    path = Path(path)
    if path.suffix in (".bin", ".idx") and path.is_file():
        path = path.with_suffix("")
    if path.is_dir():
        prefixes, others = scan(path)
        if prefixes and others:
            raise several_forms(path, [*(prefix.parent for prefix in prefixes), *others])
    else:
        prefixes = [path] if bin_path(path).is_file() or idx_path(path).is_file() else []
    if not prefixes:
        is_saved = (path / "dataset_info.json").is_file()
        raise RequestError(
            "a saved Hugging Face dataset, not packed" if is_saved else "no .bin/.idx pair here",
            where=str(path),
            needed="a folder with .bin/.idx pairs, itself or in folders below, or a prefix P of P.bin and P.idx; to "
            "train from also token shards (shard-*.tar with shard-*.json) or a packed dataset (packed.json)",
            action="make it with tools/preprocess_data.py, make_shards.py or pack_dataset.py",
        )
    halves = [half for prefix in prefixes for half in (bin_path(prefix), idx_path(prefix)) if not half.is_file()]
    if halves:
        raise RequestError(
            "half of a pair is missing: " + ", ".join(str(half) for half in halves),
            where=str(path),
            action="preprocess or copy this data again, or move the other half away",
        )
    if path.is_dir():
        for prefix in prefixes:
            check_utf8(prefix)
        check_sets(prefixes, path)
    return prefixes


def scan(folder: Path) -> tuple[list[Path], list[Path]]:
    """The prefixes of finished pairs in a folder and below, and the folders of token shards and packed datasets."""
    prefixes: set[Path] = set()
    others: list[Path] = []
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        subfolders[:] = [name for name in subfolders if not (name.startswith(".") or UNFINISHED_FOLDER.fullmatch(name))]
        if any(name == PACKED_RECORD or SHARD_FILE.fullmatch(name) for name in names):
            others.append(here)
        for name in names:
            stem, suffix = os.path.splitext(name)  # noqa: PTH122
            if name.startswith("."):
                continue
            if name.endswith(".manifest.json"):
                prefixes.add(here / name.removesuffix(".manifest.json"))
            # Below, a .bin may be a model's weights.
            elif suffix == ".idx" or (suffix == ".bin" and (here == folder or stem.endswith("_document"))):
                prefixes.add(here / stem)
    return sorted(prefixes, key=lambda prefix: natural_key(str(prefix.relative_to(folder)))), sorted(others)


def several_forms(folder: Path, places: Iterable[Path]) -> RequestError:
    """The error for a folder in which data of one form would hide that of another."""
    shown = sorted({str(place.relative_to(folder)) for place in places})
    return RequestError(
        f"more than one of .bin/.idx pairs, token shards and packed datasets is here, in {', '.join(shown)}",
        where=str(folder),
        action="name one of these folders, or keep them in separate folders",
    )


@dataclass(frozen=True)
class _Pair:
    prefix: Path
    manifest: Manifest | None
    part: SetPart | None
    owner: tuple[str, ...]
    """Equal for all parts of a set."""

    @classmethod
    def read(cls, prefix: Path) -> _Pair:
        manifest = None
        with suppress(DataError):  # reported by what opens the pair
            manifest = read_manifest(prefix)
        part = manifest.part if manifest else None
        if part is None and (match := SHARD_NAME.search(prefix.name)):
            part = SetPart(int(match[1]), int(match[2]), manifest.flags.get("cut", "") if manifest else "")
        if part is None:
            return cls(prefix, manifest, None, (str(prefix),))
        is_known = manifest is not None and part.set_id
        owner = (part.set_id, manifest.key) if manifest and is_known else (SHARD_NAME.sub("", str(prefix)),)
        return cls(prefix, manifest, part, owner)

    @property
    def root(self) -> Path | None:
        """The folder that the paths of a --per-file run begin from; None when the pair has been renamed."""
        if self.part is None or self.manifest is None:
            return None
        ending = f"/{self.part.path}_{self.manifest.key}_document"
        prefix = str(self.prefix.absolute())
        return Path(prefix.removesuffix(ending)) if prefix.endswith(ending) else None


def check_sets(prefixes: list[Path], folder: Path | None = None) -> None:
    """Raises RequestError for sets that are incomplete or mixed, and for input files that two pairs were made from.

    `folder` is where all of these pairs were found. The files of a --per-file run are missed only if it is the run's
    output folder or above it. Pairs without a manifest are judged by their names.
    """
    pairs = [_Pair.read(prefix) for prefix in prefixes]
    arrays = [pair for pair in pairs if pair.part and not pair.part.path]
    _refuse_mixed(arrays)
    for parts in _grouped(arrays, lambda pair: pair.owner):
        _refuse_incomplete(parts, "parts of an array")
    files = [pair for pair in pairs if folder and pair.root and pair.root.is_relative_to(folder.absolute())]
    for parts in _grouped([pair for pair in files if pair.part and pair.part.path], lambda pair: pair.owner):
        _refuse_incomplete(parts, "pairs of --per-file")
    _refuse_doubled(pairs)


def _grouped(pairs: list[_Pair], key: Callable[[_Pair], Any]) -> list[list[_Pair]]:
    groups: dict[Any, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[key(pair)].append(pair)
    return list(groups.values())


def _refuse_mixed(parts: list[_Pair]) -> None:
    """Parts that one name holds together, of runs that differ in their number, input or flags."""
    for named in _grouped(parts, lambda pair: SHARD_NAME.sub("", str(pair.prefix))):
        first = named[0]
        for other in named:
            if (other.owner, _count(other)) != (first.owner, _count(first)):
                raise RequestError(
                    f"{first.prefix} and {other.prefix} are parts of different runs (input, flags or number differ)",
                    needed="parts of one run, or documents are lost or doubled",
                    action="move those of one run away, or preprocess all parts again",
                )


def _count(pair: _Pair) -> int:
    return pair.part.count if pair.part else 0


def _refuse_incomplete(parts: list[_Pair], what: str) -> None:
    count, numbers = _count(parts[0]), [pair.part.index for pair in parts if pair.part]
    where = SHARD_NAME.sub("", str(parts[0].prefix))
    if missing := sorted(set(range(count)) - set(numbers)):
        raise RequestError(
            f"{len(missing)} of {count} {what} are missing: {format_ranges(missing)}",
            where=where,
            needed=f"0 to {count - 1}",
            action="run the same command again for them; to use what is there, name the pairs one by one",
        )
    if len(numbers) > len(set(numbers)):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise _doubled(*[pair for pair in parts if pair.part and pair.part.index == twice][:2])


def _refuse_doubled(pairs: list[_Pair]) -> None:
    seen: dict[tuple[str, int, str], tuple[_Pair, str]] = {}
    for pair in pairs:
        for entry in pair.manifest.inputs if pair.manifest else ():
            if pair.manifest and entry.num_tokens:
                file = entry.path, entry.num_bytes, pair.manifest.key
                other, digest = seen.setdefault(file, (pair, entry.xxh3_128))
                # Of a file that several parts share, no part knows the hash.
                if other.owner != pair.owner and (not digest or not entry.xxh3_128 or digest == entry.xxh3_128):
                    raise _doubled(other, pair)


def _doubled(first: _Pair, second: _Pair) -> RequestError:
    return RequestError(
        f"{first.prefix} and {second.prefix} hold the same documents",
        needed="each document once",
        action="move one of them away; parts that were merged are needed no more",
    )
