"""From a model's shape and a run's layout to the fields of Megatron-core's TransformerConfig.

NeMo's configs extend TransformerConfig, so the same fields serve NeMo's trainer and a bare Megatron model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.config.schema import ModelShape, Recompute, RopeScaling


def transformer_config_fields(
    shape: ModelShape,
    *,
    precision: str,
    fused_cross_entropy: bool | None = None,
) -> dict[str, Any]:
    """Keyword arguments for TransformerConfig (and NeMo's GPTConfig) that describe `shape`.

    `precision` is 'bf16' or 'fp32'. Megatron's fused cross entropy rounds the logits' gradient to bf16, so it
    is on only for bf16 unless `fused_cross_entropy` says otherwise.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    bf16 = precision == "bf16"
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.rms_norm_eps,
        "init_method_std": shape.initializer_range,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "cross_entropy_loss_fusion": bf16 if fused_cross_entropy is None else fused_cross_entropy,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
    }


def recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """The fields of TransformerConfig that say which activations the backward pass computes again."""
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": recompute.num_layers,
        }
    if recompute.granularity == "selective":
        # Of attention nothing is gained: its kernels keep no scores.
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return {}


def scaled_inverse_frequencies(inverse_frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling of rotary inverse frequencies [head_dim / 2], in radians per token.

    Frequencies that turn less than `low_freq_factor` times in the old context are divided by `factor`, those that
    turn more than `high_freq_factor` times are kept, and those between are blended
    (transformers: modeling_rope_utils._compute_llama3_parameters).
    """
    turns = scaling.original_max_position_embeddings * inverse_frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * inverse_frequencies + (1 - kept) * inverse_frequencies / scaling.factor
