"""Fields of Megatron-core's TransformerConfig that depend on the run; `models.megatron_fields` has the model's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.config.schema import Recompute, RopeScaling


def precision_fields(precision: str) -> dict[str, Any]:
    """The fields of TransformerConfig that depend on `precision`, 'bf16' or 'fp32', and the fusions that stay off.

    Megatron's fused cross entropy rounds the logits' gradient to bf16, so it is on for bf16 only.
    """
    bf16 = precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return {
        "activation_func": F.silu,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "cross_entropy_loss_fusion": bf16,
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
