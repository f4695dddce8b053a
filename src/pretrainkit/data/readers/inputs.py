"""Which files an input argument means, in which order, and the format of each."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from pathlib import Path

from pretrainkit.data.readers import compressed
from pretrainkit.data.readers.compressed import Compressed
from pretrainkit.data.readers.first_bytes import HTML, check_json_lines, compression_of
from pretrainkit.data.readers.folders import input_files, is_saved_dataset, saved_dataset_files
from pretrainkit.data.readers.jsonl import JsonLines
from pretrainkit.data.readers.source import Source
from pretrainkit.data.readers.tables import Arrow, Parquet, Table
from pretrainkit.data.readers.text import LineSource, TextFile, TextLines
from pretrainkit.errors import RequestError
from pretrainkit.files import check_utf8, read_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
FORMATS: dict[str, type[LineSource] | type[TextFile] | type[Table]] = {
    ".jsonl": JsonLines,
    ".json": JsonLines,
    ".ndjson": JsonLines,
    ".txt": TextLines,
    ".text": TextLines,
    ".parquet": Parquet,
    ".arrow": Arrow,
}
SUPPORTED = ".jsonl, .json (a record a line), .txt, each also .gz, .zst, .xz or .bz2; .parquet; saved Arrow datasets"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which part2 comes before part10; digits before letters, equal numbers by their spelling."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece), piece) if piece.isdigit() else (1, 0, piece) for piece in pieces if piece]


def resolve_inputs(
    inputs: tuple[str, ...], text_documents: str = "line", left_out: list[str] | None = None
) -> list[Source]:
    """All files that files, folders and globs mean, in natural order of their paths.

    `text_documents` says what a document is in a text file: a `line` or the whole `file`. To `left_out` it adds what
    is in the folders and not read, though a user may have meant it.
    Raises RequestError for an input that is not there, empty folders, unknown formats, a file that is named twice, or
    that is there packed and unpacked, and names that are not UTF-8.
    """
    left_out = [] if left_out is None else left_out
    found: list[tuple[Path, Path]] = []
    problems: list[RequestError] = []
    for name in inputs:
        path = Path(name)
        matches = [path] if path.exists() else _matches(name, left_out)
        files = [(file, base) for match in matches for file, base in _files_of(match, left_out)]
        if not files:
            what = "no input file in this folder" if matches else "input not found"
            problems.append(RequestError(what, where=name, needed=SUPPORTED))
        found += files
    problems += _repeated([str(file) for file, _ in found])
    found.sort(key=lambda entry: natural_key(str(entry[0])))
    sources: list[Source] = []
    pages: list[Path] = []
    for file, base in found:
        with RequestError.collected(problems):
            sources.append(_describe(file, base, text_documents, pages))
    RequestError.raise_all(problems)
    if pages:
        LOGGER.warning("%d text files begin as HTML pages, such as %s: failed downloads?", len(pages), pages[0])
    return sources


def _matches(pattern: str, left_out: list[str]) -> list[Path]:
    """What a glob matches, without what is in folders that are left out."""
    num_literal = len(list(itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)))
    found = []
    for match in map(Path, glob.glob(pattern, recursive=True)):  # noqa: PTH207
        folders = match.parts[num_literal : None if match.is_dir() else -1]
        if any(part.startswith("_") for part in folders):
            left_out.append(str(match))
        else:
            found.append(match)
    return found


def stem_of(source: Source) -> str:
    """A file's relative path without the suffixes of format and compression."""
    stem = Path(source.relative)
    while stem.suffix in compressed.SUFFIXES or stem.suffix in FORMATS:
        stem = stem.with_suffix("")
    return str(stem)


def _files_of(path: Path, left_out: list[str]) -> list[tuple[Path, Path]]:
    """The input files at a path, each with the folder that its relative path starts from."""
    if not path.is_dir():
        return [(path, path.parent)]
    if (path / "dataset_dict.json").is_file():
        raise RequestError(
            "a saved dataset with several splits",
            where=str(path),
            action=f"name one of them: {', '.join(read_json(path / 'dataset_dict.json')['splits'])}",
        )
    if is_saved_dataset(path):
        return [(file, path.parent) for file in saved_dataset_files(path)]
    return [(file, path) for file in input_files(path, lambda name: _format_of(name) is not None, left_out)]


def _repeated(files: list[str]) -> list[RequestError]:
    """Errors for files that hold the same: one that is named twice, or is there packed and unpacked."""
    problems = [
        RequestError("this file is meant twice by --input", where=file, action="name it once")
        for file, count in Counter(map(os.path.realpath, files)).items()
        if count > 1
    ]
    forms: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        stem, suffix = os.path.splitext(file)  # noqa: PTH122
        forms.setdefault(stem if suffix.lower() in compressed.SUFFIXES else file, []).append(file)
    return problems + [
        RequestError(
            f"{' and '.join(twins)} seem to hold the same, packed and unpacked",
            action="move one of them away, or rename it if it holds something else",
        )
        for twins in forms.values()
        if len(twins) > 1
    ]


def _format_of(name: str) -> type[LineSource] | type[TextFile] | type[Table] | None:
    """The format that a file name announces, inside its compression if it announces one."""
    path = Path(name.lower())
    return FORMATS.get(path.with_suffix("").suffix if path.suffix in compressed.SUFFIXES else path.suffix)


def _describe(path: Path, base: Path, text_documents: str, pages: list[Path]) -> Source:
    """The source of a file; a text file that begins as an HTML page is added to `pages`."""
    kind = _format_of(path.name)
    check_utf8(path)
    compression, start = compression_of(path)
    if kind is None:
        if not start.lstrip().startswith(b"{"):
            found = f"unknown kind of file, it starts with {start[:40]!r}"
            raise RequestError(found, where=str(path), needed=SUPPORTED)
        kind = JsonLines
    if issubclass(kind, JsonLines):
        check_json_lines(path, start)
    status = path.stat()
    facts = str(path), status.st_size, status.st_mtime_ns, str(path.relative_to(base))
    if issubclass(kind, Table):
        if compression:
            raise RequestError(
                f"a {kind.kind} file inside {compression}", where=str(path), action="decompress it first"
            )
        return kind(*facts)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RequestError("text in UTF-16", where=str(path), needed="UTF-8", action="convert it, e.g. with iconv")
    if not issubclass(kind, JsonLines) and HTML.match(start):
        pages.append(path)
    if kind is TextLines and text_documents == "file":
        kind = TextFile
    text = kind(*facts)
    return Compressed(*facts, text, compression) if compression else text
