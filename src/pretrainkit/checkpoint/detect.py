"""What kind of model folder a path is, from what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrainkit.checkpoint.formats import torch_dist
from pretrainkit.checkpoint.formats.hf_files import SINGLE_NAME
from pretrainkit.checkpoint.formats.megatron_lm import TRACKER_NAME, tracked_iteration
from pretrainkit.checkpoint.plan import CheckpointFormat
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class DetectedCheckpoint:
    """A recognised model folder."""

    format: CheckpointFormat
    root: Path
    """The folder that belongs together: what a user calls the checkpoint."""
    weights: Path
    """The folder with the weight files."""


def detect(path: Path) -> DetectedCheckpoint:
    """Recognise a folder. Raises RequestError that says what was looked for."""
    if not path.is_dir():
        raise RequestError("no such folder", where=str(path))
    if torch_dist.is_torch_dist(path / "weights"):
        return DetectedCheckpoint(CheckpointFormat.NEMO, path, path / "weights")
    if path.name == "weights" and torch_dist.is_torch_dist(path):
        return DetectedCheckpoint(CheckpointFormat.NEMO, path.parent, path)
    root = path.parent if (path.parent / TRACKER_NAME).is_file() else path
    if torch_dist.is_torch_dist(path):
        return DetectedCheckpoint(CheckpointFormat.TORCH_DIST, root, path)
    if any(path.glob("mp_rank_*")):
        return DetectedCheckpoint(CheckpointFormat.TORCH, root, path)
    if (path / TRACKER_NAME).is_file():
        return detect(tracked_iteration(path))
    if (path / "config.json").is_file():
        return DetectedCheckpoint(CheckpointFormat.HF, path, path)
    for folder in (path, path / "weights"):
        if (folder / torch_dist.CONFIG_NAME).is_file() or (folder / torch_dist.METADATA_NAME).is_file():
            raise RequestError(
                "a distributed checkpoint in another format than torch_dist (zarr, FSDP)",
                where=str(folder),
                needed="torch_dist, which megatron-core saves by default",
                action="load it with what saved it and save it as torch_dist",
            )
    raise RequestError(
        "not a model folder that is known",
        where=str(path),
        needed=f"config.json with {SINGLE_NAME} (Hugging Face), weights/ with metadata.json (NeMo), or "
        f"{TRACKER_NAME} or mp_rank_* (Megatron-LM)",
        action=_hint(path),
    )


def _hint(path: Path) -> str:
    if path.name.startswith("mp_rank_"):
        return f"one rank's part of a checkpoint: perhaps you mean {path.parent}"
    inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
    for folder in inside:
        if (folder / "weights").is_dir() or (folder / "metadata.json").is_file() or any(folder.glob("mp_rank_*")):
            return f"perhaps you mean {folder}"
    return ""
