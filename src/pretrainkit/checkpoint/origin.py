"""What a checkpoint was made of, beyond a conversion: stated in a file that goes along with its weights.

Only what changes weights is a step: an average of checkpoints. Training isn't one, and a checkpoint that was trained
from such weights doesn't inherit the file. It holds names of folders and no paths: a checkpoint may be published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrainkit.checkpoint.average import Average
from pretrainkit.checkpoint.formats.hf_files import ORIGIN_NAME
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect
from pretrainkit.checkpoint.plan import CheckpointFormat
from pretrainkit.errors import CheckpointError
from pretrainkit.files import read_json, write_json

AVERAGE = "average"
"""Kind of step."""
_FORMAT = 1


def origin_path(found: DetectedCheckpoint) -> Path:
    """Where a checkpoint's file is: next to the weights, of which Megatron-LM may have several in one folder."""
    return (found.root if found.format is CheckpointFormat.NEMO else found.weights) / ORIGIN_NAME


def read_origin(found: DetectedCheckpoint) -> list[dict[str, Any]]:
    """The steps that a checkpoint, or an average of some, was made in; empty where nothing is stated.

    Raises CheckpointError when the file isn't one of ours.
    """
    if found.average:
        return [_average_step(found.average)]
    path = origin_path(found)
    if not path.is_file():
        return []
    try:
        content = read_json(path)
        if content["format"] != _FORMAT or not all(isinstance(step["kind"], str) for step in content["steps"]):
            raise ValueError(f"format {content['format']!r}")
        return list(content["steps"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"not a statement of an origin that this version reads ({error!r})",
            where=str(path),
            action="remove it, or use the version of pretrainkit that wrote it",
        ) from error


def write_origin(folder: Path, steps: list[dict[str, Any]]) -> None:
    """State the steps in a new checkpoint, if there are any."""
    if steps:
        write_json(origin_path(detect(folder)), {"format": _FORMAT, "steps": steps})


def _average_step(average: Average) -> dict[str, Any]:
    parents = []
    for parent in average.parents:
        stated: dict[str, Any] = {"name": parent.name, "step": parent.step, "weight": parent.weight}
        if earlier := read_origin(parent.checkpoint):
            stated["origin"] = earlier
        parents.append(stated)
    dtype = average.dtype and str(average.dtype).removeprefix("torch.")
    return {"kind": AVERAGE, "rule": average.rule, "dtype": dtype, "parents": parents}
