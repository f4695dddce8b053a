"""The command-line arguments that Megatron-LM keeps in its checkpoints, for a model shape.

Megatron-LM reads them with `--use-checkpoint-args` (`load_args_from_checkpoint`) and compares some of them with
the run's (`check_checkpoint_args`), both in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.config.schema import ModelShape, RopeScaling
from pretrainkit.errors import RequestError

_MEGATRON_ROPE_SCALING = RopeScaling(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""What Megatron-LM's --use-rope-scaling fixes; only the factor is an argument."""


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
    values: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "encoder_num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "group_query_attention": shape.num_query_groups != shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "seq_length": shape.max_position_embeddings,
        "max_position_embeddings": shape.max_position_embeddings,
        "position_embedding_type": "rope",
        "add_position_embedding": True,  # Megatron-LM's default, compared with the run's; rope adds none all the same
        "use_rotary_position_embeddings": True,
        "rotary_base": int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": shape.rms_norm_eps,
        "apply_layernorm_1p": False,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "untie_embeddings_and_output_weights": not shape.tie_word_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": shape.initializer_range,
        "make_vocab_size_divisible_by": divisor,
        "padded_vocab_size": padded_vocab_size,
        "vocab_size": shape.vocab_size,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tensor_model_parallel_size": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "expert_model_parallel_size": parallelism.expert,
        "decoder_first_pipeline_num_layers": parallelism.first_stage_layers,
        "decoder_last_pipeline_num_layers": parallelism.last_stage_layers,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": format,
        "use_dist_ckpt": format == "torch_dist",
        "transformer_impl": "transformer_engine",
        "no_save_optim": True,
        "no_save_rng": True,
        **_rope_scaling(shape),
        **_experts(shape),
    }
    return argparse.Namespace(**values)


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"use_rope_scaling": False}
    fixed = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    wrong = [name for name in fixed if getattr(scaling, name) != getattr(_MEGATRON_ROPE_SCALING, name)]
    if wrong:
        raise RequestError(
            "Megatron-LM can't express " + ", ".join(f"{name} {getattr(scaling, name)}" for name in wrong),
            where="rope_scaling",
            needed=", ".join(f"{name} {getattr(_MEGATRON_ROPE_SCALING, name)}" for name in wrong),
            action="use the format nemo",
        )
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}


def _experts(shape: ModelShape) -> dict[str, Any]:
    if not shape.num_experts:
        return {"num_experts": None}
    return {
        "num_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": shape.router_aux_loss_coef,
        "moe_grouped_gemm": True,
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden_size or None,
    }


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


CHECKED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "rotary_base",
    "norm_epsilon",
    "untie_embeddings_and_output_weights",
    "add_qkv_bias",
    "qk_layernorm",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
)
"""Arguments that say what the model computes. Those of the run (world size, batch sizes) are not looked at."""


def check_args(found: Any, shape: ModelShape, where: str) -> None:
    """Raise RequestError when the arguments in a checkpoint contradict the shape that it is read with.

    Arguments that are absent are not missed: nothing is taken from them.
    """
    expected = megatron_args(shape, Parallelism(), padded_vocab_size=0, divisor=1, dtype=torch.float32, format="torch")
    if not getattr(found, "group_query_attention", True):
        found = argparse.Namespace(**{**vars(found), "num_query_groups": getattr(found, "num_attention_heads", None)})
    problems = []
    for name in CHECKED:
        value, wanted = getattr(found, name, None), getattr(expected, name, None)
        if value is not None and isinstance(value, (bool, int, float)) and wanted is not None and value != wanted:
            problems.append(f"{name} is {value} in the checkpoint and {wanted} by config.json")
    if problems:
        raise RequestError("; ".join(problems), where=where, needed="the config.json of the model in this checkpoint")
