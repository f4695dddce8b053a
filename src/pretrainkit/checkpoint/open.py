"""Recognises checkpoints by what is there and opens them: a reader, or a writer with the files around the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pretrainkit.checkpoint.average import Average, AverageReader
from pretrainkit.checkpoint.formats import hf_files, megatron_lm, nemo, torch_dist
from pretrainkit.checkpoint.formats.carried import write_carried
from pretrainkit.checkpoint.formats.hf import HfReader, HfWriter
from pretrainkit.checkpoint.formats.torch_dist import TorchDistReader
from pretrainkit.checkpoint.formats.torch_dist_writer import TorchDistWriter
from pretrainkit.checkpoint.formats.torch_legacy import TorchLegacyReader
from pretrainkit.checkpoint.formats.torch_legacy_writer import TorchLegacyWriter
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.plan import MEGATRON_LM, CheckpointFormat, ConversionPlan
from pretrainkit.checkpoint.vocabulary import ExtendedReader
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.megatron_fields import megatron_lm_arguments


@dataclass(frozen=True)
class DetectedCheckpoint:
    """A recognised model folder."""

    format: CheckpointFormat
    root: Path
    """The folder that belongs together: what a user calls the checkpoint."""
    weights: Path
    """The folder with the weight files."""
    average: Average | None = None
    """Set where the average of several checkpoints is meant; format and folders are then those of the last of them."""

    def __str__(self) -> str:
        """What it is, for people."""
        return f"average of {len(self.average.parents)} checkpoints" if self.average else str(self.root)

    @property
    def kind(self) -> str:
        """Its format, or those of the checkpoints that are averaged."""
        each = [parent.checkpoint.format for parent in self.average.parents] if self.average else [self.format]
        return ", ".join(dict.fromkeys(each))


def detect(path: Path) -> DetectedCheckpoint:
    """Recognise a folder. Raises RequestError that says what was looked for."""
    if not path.is_dir():
        raise RequestError("no such folder", where=str(path))
    if torch_dist.is_torch_dist(path / "weights"):
        return DetectedCheckpoint(CheckpointFormat.NEMO, path, path / "weights")
    if path.name == "weights" and torch_dist.is_torch_dist(path):
        return DetectedCheckpoint(CheckpointFormat.NEMO, path.parent, path)
    root = path.parent if (path.parent / megatron_lm.TRACKER_NAME).is_file() else path
    if torch_dist.is_torch_dist(path):
        return DetectedCheckpoint(CheckpointFormat.TORCH_DIST, root, path)
    if any(path.glob("mp_rank_*")):
        return DetectedCheckpoint(CheckpointFormat.TORCH, root, path)
    if (path / megatron_lm.TRACKER_NAME).is_file():
        return detect(megatron_lm.tracked_iteration(path))
    hf_files.check_no_adapter(path)
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
        needed=f"config.json with {hf_files.SINGLE_NAME} (Hugging Face), weights/ with metadata.json (NeMo), or "
        f"{megatron_lm.TRACKER_NAME} or mp_rank_* (Megatron-LM)",
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


WeightReader: TypeAlias = HfReader | TorchDistReader | TorchLegacyReader | AverageReader | ExtendedReader
"""`read` gives a mapping's Hugging Face tensors. `dtypes` are the stored ones, `notes` say what is left out."""
WeightWriter: TypeAlias = HfWriter | TorchDistWriter | TorchLegacyWriter
"""`write_part` writes the Hugging Face tensors of `parts[i]`, each part by one worker; `finish` comes after all."""


def open_reader(checkpoint: DetectedCheckpoint, mappings: Sequence[TensorMapping], shape: ModelShape) -> WeightReader:
    """The reader of a checkpoint. Raises RequestError or CheckpointError unless it has exactly the model's tensors."""
    if average := checkpoint.average:
        return AverageReader([open_reader(each.checkpoint, mappings, shape) for each in average.parents], average)
    if checkpoint.format is CheckpointFormat.HF:
        return HfReader(checkpoint.weights, mappings, tied=shape.tie_word_embeddings)
    if checkpoint.format is CheckpointFormat.TORCH:
        return TorchLegacyReader(checkpoint.weights, mappings, shape)
    if checkpoint.format is CheckpointFormat.NEMO:
        nemo.check_settings(checkpoint.root / "context", shape)
    return TorchDistReader(checkpoint.weights, mappings, shape)


def check_expressible(shape: ModelShape, format: CheckpointFormat) -> None:
    """Raise RequestError when a format can't describe the model."""
    if format in MEGATRON_LM:
        megatron_lm_arguments(shape)


def open_writer(folder: Path, plan: ConversionPlan) -> WeightWriter:
    """The writer of a new checkpoint in an empty folder; config, tokenizer and other files are written at once."""
    if plan.format is CheckpointFormat.HF:
        hf_files.write_description(folder, plan.hf_folder, plan.main_dtype, keep=plan.options.keep_config)
        return HfWriter(folder, plan)
    hf_files.copy_description(plan.hf_folder, folder / hf_files.HF_SOURCE)
    write_carried(folder / hf_files.HF_SOURCE, plan.carried)
    if plan.format is CheckpointFormat.NEMO:
        nemo.write_context(
            folder / "context",
            plan.shape,
            plan.main_dtype,
            plan.hf_folder,
            vocabulary_divisor=plan.vocabulary_divisor,
        )
        (folder / "weights").mkdir()
        return TorchDistWriter(folder / "weights", plan, nemo.common_state(), prefix="module.")
    weights = megatron_lm.create_iteration(folder, megatron_lm.iteration(plan))
    common = megatron_lm.common_state(plan)
    if plan.format is CheckpointFormat.TORCH_DIST:
        return TorchDistWriter(weights, plan, {**common, "content_metadata": nemo.CONTENT_METADATA}, prefix="")
    return TorchLegacyWriter(weights, plan, common)
