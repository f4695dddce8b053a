"""What Megatron-LM keeps around the weights in both of its formats: tracker file, iteration folder, arguments.

Megatron-LM reads the arguments with `--use-checkpoint-args` (`load_args_from_checkpoint`) and compares some of them
with those of the run (`check_checkpoint_args`), both in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.plan import CheckpointFormat, ConversionPlan
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.megatron_fields import check_stored, megatron_lm_arguments

TRACKER_NAME = "latest_checkpointed_iteration.txt"
CHECKPOINT_VERSION = 3.0
"""Megatron-LM's number for the QKV order that is used here; older versions order it differently."""


def create_iteration(folder: Path, iteration: int | None) -> Path:
    """Write the tracker file and create the folder that it names; None means a release."""
    weights = folder / ("release" if iteration is None else f"iter_{iteration:07d}")
    weights.mkdir()
    (folder / TRACKER_NAME).write_text("release" if iteration is None else str(iteration), encoding="ascii")
    return weights


def tracked_iteration(folder: Path) -> Path:
    """The folder that the tracker file names. Raises RequestError unless it exists."""
    text = (folder / TRACKER_NAME).read_text(encoding="utf-8", errors="replace").strip()
    name = "release" if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else None
    if name is None or not (folder / name).is_dir():
        present = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise RequestError(
            f"{TRACKER_NAME} says {text!r}, which names no folder here",
            where=str(folder),
            needed=f"one of {', '.join(present) or 'no folders at all'}",
            action="give the folder of the iteration itself",
        )
    return folder / name


def common_state(plan: ConversionPlan) -> dict[str, Any]:
    """What a checkpoint holds besides the weights.

    Raises RequestError when Megatron-LM can't express the model's rotary scaling.
    """
    parallelism, dtype = plan.options.parallelism, plan.main_dtype
    arguments = argparse.Namespace(
        **megatron_lm_arguments(plan.shape),
        make_vocab_size_divisible_by=plan.vocabulary_divisor,
        padded_vocab_size=plan.padded_vocab_size,
        tokenizer_type="HuggingFaceTokenizer",
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        expert_model_parallel_size=parallelism.expert,
        decoder_first_pipeline_num_layers=parallelism.first_stage_layers,
        decoder_last_pipeline_num_layers=parallelism.last_stage_layers,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        ckpt_format=str(plan.format),
        use_dist_ckpt=plan.format is CheckpointFormat.TORCH_DIST,
        transformer_impl="transformer_engine",
        no_save_optim=True,
        no_save_rng=True,
    )
    return {
        "args": arguments,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": plan.options.iteration or 0,
        "num_floating_point_operations_so_far": 0,
    }


def required_flags(shape: ModelShape) -> str:
    """The flags that a run needs in addition to --use-checkpoint-args, which doesn't restore these arguments."""
    flags = [f"--norm-epsilon {shape.rms_norm_eps:g}"]
    if shape.qk_norm:
        flags.append("--qk-layernorm")
    if shape.rope_scaling:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {shape.rope_scaling.factor:g}")
    if shape.num_experts and shape.shared_expert_ffn_hidden_size:
        flags.append("--moe-shared-expert-gate")
    return " ".join(flags)


def check_args(state: Any, shape: ModelShape, where: object) -> None:
    """Raise RequestError when the arguments in a checkpoint contradict the shape that it is read with.

    `state` is what a rank's file or common.pt holds. Arguments may be absent: nothing is taken from them.
    """
    if not isinstance(state, dict) or not isinstance(state.get("args"), argparse.Namespace):
        return
    stored = dict(vars(state["args"]))
    if not stored.get("group_query_attention", True):
        stored["num_query_groups"] = stored.get("num_attention_heads")
    check_stored(stored, megatron_lm_arguments(shape), where)
