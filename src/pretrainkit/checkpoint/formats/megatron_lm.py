"""What Megatron-LM keeps around the weights in both of its formats: tracker file, iteration folder, arguments.

Megatron-LM reads the arguments with `--use-checkpoint-args` (`load_args_from_checkpoint`) and compares some of them
with those of the run (`check_checkpoint_args`), both in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE
from pretrainkit.checkpoint.plan import MEGATRON_LM, CheckpointFormat, ConversionPlan
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.family import names
from pretrainkit.models.megatron_fields import NEUTRAL, check_stored, megatron_lm_arguments

TRACKER_NAME = "latest_checkpointed_iteration.txt"
CHECKPOINT_VERSION = 3.0
"""Megatron-LM's number for the QKV order that is used here; older versions order it differently."""

_OF_THE_TARGET = names("""
    bf16 ckpt_format decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers expert_model_parallel_size fp16
    make_vocab_size_divisible_by moe_grouped_gemm padded_vocab_size params_dtype pipeline_model_parallel_size
    tensor_model_parallel_size transformer_impl use_dist_ckpt
""")
"""Arguments that describe how the target is stored; the others of a run are carried over to it."""
_INTERLEAVED = names("""
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout
    virtual_pipeline_model_parallel_size
""")
"""Arguments of a run that split the layers otherwise than the target is split; None in it."""


_OF_LATENT_ATTENTION = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    *("moe_router_num_groups", "moe_router_group_topk"),
)
"""Arguments of a model with latent attention that a run needs as flags."""


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


def run_state(state: Any, folder: Path) -> dict[str, Any]:
    """What a checkpoint knows of its run: the arguments, and unless it is a release the iteration.

    `state` is what a rank's file or common.pt holds; empty where those aren't Megatron-LM's.
    """
    if not isinstance(state, dict) or not isinstance(state.get("args"), argparse.Namespace):
        return {}
    wanted = ["args", "num_floating_point_operations_so_far"]
    wanted += ["iteration"] if folder.name != "release" and state.get("iteration") else []
    return {name: state[name] for name in wanted if name in state}


def iteration(plan: ConversionPlan) -> int | None:
    """The iteration that a checkpoint is written as, None for a release: the one asked for, or the source's."""
    return plan.run_state.get("iteration") if plan.options.iteration is None else plan.options.iteration


def common_state(plan: ConversionPlan) -> dict[str, Any]:
    """What a checkpoint holds besides the weights: arguments of the source's run where it has them.

    Raises RequestError when Megatron-LM can't express the model's rotary scaling.
    """
    arguments = _target_arguments(plan)
    if stored := _stored_arguments(plan):
        kept = {name: value for name, value in stored.items() if _is_plain(value)}
        of_the_target = {name: value for name, value in arguments.items() if name in _OF_THE_TARGET}
        if "expert_tensor_parallel_size" in kept:
            of_the_target["expert_tensor_parallel_size"] = plan.options.parallelism.tensor
        arguments = {**arguments, **kept, **of_the_target, **dict.fromkeys(_INTERLEAVED & kept.keys())}
    return {
        "num_floating_point_operations_so_far": 0,
        **plan.run_state,
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration(plan) or 0,
    }


def run_notes(plan: ConversionPlan) -> Iterator[str]:
    """Sentences about what became of the arguments of the source's run."""
    if not (stored := _stored_arguments(plan)):
        return
    if plan.format not in MEGATRON_LM:
        yield f"{len(stored)} arguments of the checkpoint's run left out: {plan.format} has no place for them"
        return
    written = vars(common_state(plan)["args"])
    lost = [f"{name} ({type(value).__name__})" for name, value in stored.items() if name not in written]
    changed = [
        f"{name} {value} to {written[name]}"
        for name, value in stored.items()
        if name in written and written[name] != value
    ]
    yield f"{len(stored) - len(lost) - len(changed)} arguments of the checkpoint's run carried over" + (
        f"; changed: {', '.join(changed)}" if changed else ""
    )
    if lost:
        yield f"arguments that can't be carried over, since they are objects of Python classes: {', '.join(lost)}"


def _stored_arguments(plan: ConversionPlan) -> dict[str, Any]:
    return vars(plan.run_state["args"]) if plan.run_state else {}


def _is_plain(value: Any) -> bool:
    """Whether an argument can be written without importing the class that it is of."""
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype))


def _target_arguments(plan: ConversionPlan) -> dict[str, Any]:
    """The arguments of a model and of how a checkpoint is stored."""
    parallelism, dtype = plan.options.parallelism, plan.main_dtype
    return dict(
        **megatron_lm_arguments(plan.shape),
        **({"moe_grouped_gemm": plan.grouped_experts} if plan.shape.num_experts else {}),
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


def required_flags(plan: ConversionPlan) -> str:
    """The flags that a run needs in addition to --use-checkpoint-args, which doesn't restore these arguments."""
    shape = plan.shape
    flags = [f"--norm-epsilon {shape.rms_norm_eps:g}"]
    if shape.qk_norm:
        flags.append("--qk-layernorm")
    arguments = megatron_lm_arguments(shape)
    if arguments["use_rope_scaling"]:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {arguments['rope_scaling_factor']:g}")
    if arguments.get("moe_shared_expert_gate"):
        flags.append("--moe-shared-expert-gate")
    if shape.features.latent_attention:
        flags.append("--multi-latent-attention --qk-layernorm")
        values = {name: arguments.get(name) for name in _OF_LATENT_ATTENTION}
        flags += [f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value is not None]
    if not _stored_arguments(plan).get("tokenizer_model"):
        flags.append(f"--tokenizer-model CHECKPOINT/{HF_SOURCE}")
    if iteration(plan) is not None:
        flags.append("--no-load-optim --no-load-rng")
    return " ".join(flags)


def check_args(state: Any, shape: ModelShape, where: object) -> None:
    """Raise RequestError when the arguments in a checkpoint contradict the shape that it is read with.

    `state` is what a rank's file or common.pt holds. An argument that an older Megatron-LM didn't have is off.
    """
    if not isinstance(state, dict) or not isinstance(state.get("args"), argparse.Namespace):
        return
    stored = dict(vars(state["args"]))
    if not stored.get("group_query_attention", True):
        stored["num_query_groups"] = stored.get("num_attention_heads")
    check_stored(stored, megatron_lm_arguments(shape), where, absent=NEUTRAL)
