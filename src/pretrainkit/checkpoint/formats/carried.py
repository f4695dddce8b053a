"""The tensors of a multimodal model besides its text model's: no conversion or training changes them.

A Megatron checkpoint has them in a file of its `hf_source/`, a release among its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pretrainkit.checkpoint.formats.hf import copy_tensors, locate_tensors, read_header
from pretrainkit.checkpoint.formats.hf_files import weight_files
from pretrainkit.checkpoint.lazy_tensor import StoredTensor
from pretrainkit.errors import RequestError
from pretrainkit.models.multimodal import is_multimodal, text_tensors
from pretrainkit.models.registry import read_whole_config

CARRIED_NAME = "other_tensors.safetensors"


def carried_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Those of a model folder or an `hf_source/`, by name; none of a text model.

    Raises RequestError where a multimodal model's are not there.
    """
    if not is_multimodal(read_whole_config(folder)):
        return {}
    if (folder / CARRIED_NAME).is_file():
        return read_header(folder / CARRIED_NAME)
    tensors = text_tensors(locate_tensors(folder))[1] if weight_files(folder) else {}
    if not tensors:
        raise RequestError(
            "config.json is a multimodal model's, and there are no tensors but those of its text model",
            where=str(folder),
            needed="all tensors of the model: its release has them",
            action="take the original folder; with a checkpoint of another tool --hf-model names it",
        )
    return tensors


def write_carried(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the file of an `hf_source/`, if there are any."""
    if tensors:
        copy_tensors(folder / CARRIED_NAME, tensors)
