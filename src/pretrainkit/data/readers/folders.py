"""Which files below a folder are input.

Left out are hidden files and folders, folders whose names begin with `_` (Spark writes unfinished jobs there), files
of unknown formats, and the output of our own tools, which may be written next to their input.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from pretrainkit.data.names import PACKED_RECORD, STATE_SUFFIX, UNFINISHED_FOLDER
from pretrainkit.errors import RequestError
from pretrainkit.files import TEMPORARY_MARK, read_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
NAMED = 5
"""Files that a warning names."""
_OWN_RECORD = b'{\n  "format": "pretrainkit-'
_OWN_REJECTS = (b'{"file":"', b'{"path": "')
_OWN_NAME = re.compile(
    r".+_document\.(bin|idx|manifest\.json)|shard-\d{5}\.(tar|samples)|.+\.(lock|preparing|failed)"
    rf"|.+{re.escape(TEMPORARY_MARK)}.+"
)


def input_files(folder: Path, has_format: Callable[[str], bool], left_out: list[str]) -> list[Path]:
    """The input files below a folder; `has_format` says of a name whether it announces a format.

    To `left_out` it adds the files and `_*` folders that a user may have meant. Raises RequestError for a saved dataset
    that has no files of its own.
    """
    found: list[Path] = []
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        if _is_own_folder(here, names):
            subfolders.clear()
            continue
        if is_saved_dataset(here):
            subfolders.clear()
            found += saved_dataset_files(here)
            continue
        left_out += [f"{here / name}/" for name in subfolders if name.startswith("_")]
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "_")))
        for name in names:
            path = here / name
            if name.startswith(".") or _is_own_file(path):
                continue
            if has_format(name):
                found.append(path)
            elif not name.startswith("_"):  # such as _SUCCESS
                left_out.append(str(path))
    return found


def warn_of_left_out(left_out: list[str]) -> None:
    """Name what `input_files` has left out."""
    if left_out:
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        names = ", ".join(left_out[:NAMED]).encode(errors="backslashreplace").decode()
        LOGGER.warning("%d in input folders are not read, as their suffix is unknown: %s%s", len(left_out), names, more)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote it."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved dataset, in order. Raises RequestError when its rows are a selection of theirs."""
    state = read_json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise RequestError(
            "a saved dataset that is a selection of another",
            where=str(folder),
            action="save it again after `dataset.flatten_indices()`",
        )
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _is_own_folder(folder: Path, names: list[str]) -> bool:
    """Whether it is a packed dataset, or unfinished work."""
    is_other = folder.name.endswith(STATE_SUFFIX) and "lock" not in names
    return PACKED_RECORD in names or (UNFINISHED_FOLDER.fullmatch(folder.name) is not None and not is_other)


def _is_own_file(path: Path) -> bool:
    if _OWN_NAME.fullmatch(path.name):
        return True
    if path.suffix == ".json":
        return _begins(path, _OWN_RECORD)
    return path.name.endswith(".rejects.jsonl") and _begins(path, *_OWN_REJECTS)


def _begins(path: Path, *starts: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(max(map(len, starts))).startswith(starts)
    except OSError:  # reported when the file is described
        return False
