"""Opens checkpoints: the reader of a detected one, and the writer of a new one with the files around its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pretrainkit.checkpoint.detect import DetectedCheckpoint
from pretrainkit.checkpoint.formats import hf_files, megatron_lm, nemo
from pretrainkit.checkpoint.formats.hf import HfReader, HfWriter
from pretrainkit.checkpoint.formats.torch_dist import TorchDistReader
from pretrainkit.checkpoint.formats.torch_dist_writer import TorchDistWriter
from pretrainkit.checkpoint.formats.torch_legacy import TorchLegacyReader
from pretrainkit.checkpoint.formats.torch_legacy_writer import TorchLegacyWriter
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.plan import CheckpointFormat, ConversionPlan
from pretrainkit.config.schema import ModelShape
from pretrainkit.models.megatron_fields import megatron_lm_arguments, nemo_model

WeightReader: TypeAlias = HfReader | TorchDistReader | TorchLegacyReader
"""`read` gives a mapping's Hugging Face tensors. `dtypes` are the stored ones, `notes` say what is left out."""
WeightWriter: TypeAlias = HfWriter | TorchDistWriter | TorchLegacyWriter
"""`write_part` writes the Hugging Face tensors of `parts[i]`, each part by one worker; `finish` comes after all."""


def open_reader(checkpoint: DetectedCheckpoint, mappings: Sequence[TensorMapping], shape: ModelShape) -> WeightReader:
    """The reader of a checkpoint. Raises RequestError or CheckpointError unless it has exactly the model's tensors."""
    if checkpoint.format is CheckpointFormat.HF:
        return HfReader(checkpoint.weights, mappings, tied=shape.tie_word_embeddings)
    if checkpoint.format is CheckpointFormat.TORCH:
        return TorchLegacyReader(checkpoint.weights, mappings, shape)
    if checkpoint.format is CheckpointFormat.NEMO:
        nemo.check_settings(checkpoint.root / "context", shape)
    return TorchDistReader(checkpoint.weights, mappings, shape)


def check_expressible(shape: ModelShape, format: CheckpointFormat) -> None:
    """Raise RequestError when a format can't describe the model."""
    if format is CheckpointFormat.NEMO:
        nemo_model(shape)
    elif format is not CheckpointFormat.HF:
        megatron_lm_arguments(shape)


def open_writer(folder: Path, plan: ConversionPlan) -> WeightWriter:
    """The writer of a new checkpoint in an empty folder; config, tokenizer and other files are written at once."""
    if plan.format is CheckpointFormat.HF:
        hf_files.write_config(folder, plan.hf_folder, plan.main_dtype)
        hf_files.copy_side_files(plan.hf_folder, folder)
        return HfWriter(folder, plan)
    hf_files.save_hf_source(plan.hf_folder, folder)
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
    weights = megatron_lm.create_iteration(folder, plan.options.iteration)
    common = megatron_lm.common_state(plan)
    if plan.format is CheckpointFormat.TORCH_DIST:
        return TorchDistWriter(weights, plan, {**common, "content_metadata": nemo.CONTENT_METADATA}, prefix="")
    return TorchLegacyWriter(weights, plan, common)
