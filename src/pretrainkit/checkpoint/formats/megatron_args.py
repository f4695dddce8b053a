"""The command-line arguments that Megatron-LM keeps in its checkpoints, for a model shape.

Megatron-LM reads them with `--use-checkpoint-args` (`load_args_from_checkpoint`) and compares some of them with
the run's (`check_checkpoint_args`), both in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import argparse

import torch

from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.megatron_fields import contradictions, megatron_lm_arguments


def megatron_args(
    shape: ModelShape,
    parallelism: Parallelism,
    *,
    padded_vocab_size: int,
    divisor: int,
    dtype: torch.dtype,
    format: str,
) -> argparse.Namespace:
    """Arguments for a checkpoint in `format` ("torch" or "torch_dist").

    Raises RequestError when Megatron-LM can't express the model's rotary scaling.
    """
    return argparse.Namespace(
        **megatron_lm_arguments(shape),
        make_vocab_size_divisible_by=divisor,
        padded_vocab_size=padded_vocab_size,
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
        ckpt_format=format,
        use_dist_ckpt=format == "torch_dist",
        transformer_impl="transformer_engine",
        no_save_optim=True,
        no_save_rng=True,
    )


def flags_to_add(shape: ModelShape) -> str:
    """What a run must be given beside --use-checkpoint-args, since Megatron-LM doesn't take it from a checkpoint."""
    flags = [f"--norm-epsilon {shape.rms_norm_eps:g}"]
    if shape.qk_norm:
        flags.append("--qk-layernorm")
    if shape.rope_scaling:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {shape.rope_scaling.factor:g}")
    if shape.num_experts and shape.shared_expert_ffn_hidden_size:
        flags.append("--moe-shared-expert-gate")
    return " ".join(flags)


def check_args(found: argparse.Namespace, shape: ModelShape, where: str) -> None:
    """Raise RequestError when the arguments in a checkpoint contradict the shape that it is read with.

    Arguments may be absent: nothing is taken from them.
    """
    stored = vars(found)
    if not stored.get("group_query_attention", True):
        stored = {**stored, "num_query_groups": stored.get("num_attention_heads")}
    if problems := contradictions(stored, megatron_lm_arguments(shape)):
        raise RequestError("; ".join(problems), where=where, needed="the config.json of the model in this checkpoint")
