"""The files of a Hugging Face folder that hold its weights; there may be others, such as Mistral's consolidated one."""

from __future__ import annotations

from pathlib import Path

from pretrainkit.errors import RequestError
from pretrainkit.files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, sorted; they need not all exist. Empty when there are no weights.

    Raises RequestError when transformers would load another file than those that the index lists.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if not index.is_file():
        return [single] if single.is_file() else []
    names = set(read_json(index)["weight_map"].values())
    if single.is_file() and SINGLE_NAME not in names:
        raise RequestError(
            f"{SINGLE_NAME} and an index of other files: two models",
            where=str(folder),
            needed="one of them: transformers loads the file, other tools what the index lists",
            action=f"move {SINGLE_NAME}, or {INDEX_NAME} with its files, away",
        )
    return [folder / name for name in sorted(names)]
