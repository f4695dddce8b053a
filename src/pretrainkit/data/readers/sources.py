"""Which files an input argument means, in which order, and how each is wrapped."""

from __future__ import annotations

import glob
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.data.indexed.pairs import natural_key
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
FORMATS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".text": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
MAGICS = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2"}
SUPPORTED = ".jsonl, .json (a record a line), .txt, each also .gz, .zst, .xz or .bz2; .parquet; saved Arrow datasets"


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    format: str
    """`jsonl`, `txt` (a document a line), `txt-file` (a document a file), `parquet` or `arrow`."""
    compression: str
    """`gz`, `zst`, `xz`, `bz2` or empty."""
    num_bytes: int
    """On disk."""
    modified_ns: int
    relative: str
    """Path below the folder that was named as input, or the file's name."""

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from its beginning."""
        return bool(self.compression)

    @property
    def stem(self) -> str:
        """Relative path without the suffixes of format and compression."""
        stem = Path(self.relative)
        while stem.suffix in COMPRESSIONS or stem.suffix in FORMATS:
            stem = stem.with_suffix("")
        return str(stem)


def resolve_inputs(inputs: tuple[str, ...], text_documents: str = "line") -> list[Source]:
    """All files that files, folders and globs mean, in natural order of their paths.

    `text_documents` says what a document is in a text file: a `line` or the whole `file`.
    Raises RequestError for an input that is not there, empty folders, unknown formats, a file meant twice.
    """
    found: list[tuple[Path, Path]] = []
    problems: list[RequestError] = []
    for name in inputs:
        path = Path(name)
        if path.exists():
            matches = [path]
        else:
            matches = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207
        files = [(file, base) for match in matches for file, base in _files_of(match)]
        if not files:
            what = "no input file in this folder" if matches else "input not found"
            problems.append(RequestError(what, where=name, needed=SUPPORTED))
        found += files
    counts = Counter(os.path.realpath(file) for file, _ in found)
    problems += [
        RequestError("this file is meant twice by --input", where=file, action="name it once")
        for file, count in counts.items()
        if count > 1
    ]
    found.sort(key=lambda entry: natural_key(str(entry[0])))
    sources = []
    for file, base in found:
        try:
            sources.append(_describe(file, base, text_documents))
        except RequestError as error:
            problems.append(error)
        except OSError as error:
            problems.append(RequestError(f"can't be read: {error.strerror}", where=str(file)))
    if problems:
        raise RequestError.of_all(problems)
    return sources


def _files_of(path: Path) -> list[tuple[Path, Path]]:
    """The input files at a path, each with the folder that its relative path starts from."""
    if path.is_file():
        return [(path, path.parent)]
    if (path / "dataset_dict.json").is_file():
        raise RequestError(
            "a saved dataset with several splits",
            where=str(path),
            action=f"name one of them: {', '.join(read_json(path / 'dataset_dict.json')['splits'])}",
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return [(file, path.parent) for file in _arrow_files(path)]
    files, others = [], 0
    for folder, subfolders, names in os.walk(path, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            file = Path(folder) / name
            if name.startswith(".") or _suffixes(name)[0] is None:
                others += not name.startswith(".")
            else:
                files.append((file, path))
    if others:
        LOGGER.info("%s: %d other files there are not input", path, others)
    return files


def _arrow_files(folder: Path) -> list[Path]:
    state = read_json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise RequestError(
            "a saved dataset that is a selection of another",
            where=str(folder),
            action="save it again after `dataset.flatten_indices()`",
        )
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _suffixes(name: str) -> tuple[str | None, str]:
    """Format and compression that a file name announces; no format if it announces none."""
    path = Path(name.lower())
    compression = COMPRESSIONS.get(path.suffix, "")
    if compression:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix), compression


def _describe(path: Path, base: Path, text_documents: str) -> Source:
    kind, _ = _suffixes(path.name)
    with path.open("rb") as file:
        start = file.read(8)
    status = path.stat()
    compression = next((name for magic, name in MAGICS.items() if start.startswith(magic)), "")
    if kind is None:
        if not compression and not start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise RequestError(f"unknown kind of file, it starts with {start!r}", where=str(path), needed=SUPPORTED)
        kind = "jsonl"
    if kind in ("jsonl", "txt") and start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RequestError("text in UTF-16", where=str(path), needed="UTF-8", action="convert it, e.g. with iconv")
    if kind in ("parquet", "arrow") and compression:
        raise RequestError(f"a {kind} file inside {compression}", where=str(path), action="unpack it first")
    if kind == "txt" and text_documents == "file":
        kind = "txt-file"
    relative = str(path.relative_to(base))
    return Source(str(path), kind, compression, status.st_size, status.st_mtime_ns, relative)
