"""A Megatron-core model with a checkpoint's weights, to compare its logits and losses with other implementations'.

It has the modules that training uses, at any tensor parallel size, without a trainer and NeMo. Here are also the fields
of Megatron's TransformerConfig that depend on the run; `models.megatron_fields` has the model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.schema import Fp8, Kernels, ModelShape, Recompute
from pretrainkit.megatron import features
from pretrainkit.megatron.kernels import config_fields
from pretrainkit.megatron.layer_spec import torch_layer_spec
from pretrainkit.models.megatron_fields import transformer_config_fields


def precision_fields(precision: str) -> dict[str, Any]:
    """The fields of TransformerConfig that depend on `precision`, 'bf16' or 'fp32', and the fusions that stay off.

    Megatron's fused cross entropy rounds the logits' gradient to bf16, so it is on for bf16 only.
    """
    bf16 = precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return {
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "cross_entropy_loss_fusion": bf16,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
    }


def expert_fields(shape: ModelShape, *, expert: int, expert_tensor: int, layer_spec: str = "torch") -> dict[str, Any]:
    """The fields of TransformerConfig that depend on how a model's experts are spread over ranks; none without experts.

    Tokens are never dropped, the router computes in fp32, and all-to-all sends a token to its experts' ranks only.
    """
    if not shape.num_experts:
        return {}
    is_te = layer_spec == "te"
    return {
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": is_te,  # what Megatron calls so is Transformer Engine's, or another package's
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_permute_fusion": is_te,
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


def initialize(*, tensor_parallel_size: int = 1) -> None:
    """Create Megatron's process groups, on every rank, after torch.distributed is initialized."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        model_parallel_cuda_manual_seed(0)


def build_model(
    shape: ModelShape,
    *,
    padded_vocab_size: int,
    sequence_length: int,
    precision: str = "fp32",
    kernels: Kernels | None = None,
    fp8: Fp8 | None = None,
) -> GPTModel:
    """This rank's part of the model, with random weights; `patches.apply_kernels` has been called for `kernels`.

    `fp8`: the layers' products are in FP8, with precision bf16.
    """
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    fields = {**transformer_config_fields(shape), **precision_fields(precision)}
    fields |= expert_fields(
        shape,
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    fields |= features.config_fields(shape.features, shape.num_layers)
    if shape.num_experts:
        fields["sequence_parallel"] = tensor_parallel_size > 1  # Megatron requires it
    config = TransformerConfig(**fields, tensor_model_parallel_size=tensor_parallel_size)
    if kernels:
        for name, value in config_fields(kernels, qk_norm=shape.qk_norm).items():
            setattr(config, name, value)
    model = GPTModel(
        config,
        transformer_layer_spec=torch_layer_spec(
            config,
            fused_norm=kernels is not None and kernels.norm == "triton",
            fp8=fp8,
            features=shape.features,
            rope_scaling=shape.rope_scaling,
        ),
        vocab_size=padded_vocab_size,
        max_sequence_length=sequence_length,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    return features.finish_model(
        model, rope_theta=shape.rope_theta, rope_scaling=shape.rope_scaling, features=shape.features
    )


def load_model(weights: Path, shape: ModelShape, *, key_prefix: str = "module.", **settings: Any) -> GPTModel:
    """This rank's part of the model, with the weights of a torch_dist folder, ready to evaluate.

    `key_prefix` stands before every tensor's name in the folder: 'module.' as NeMo writes it. `settings` are
    those of `build_model`.
    """
    model = build_model(shape, **settings)
    state: dict[str, Any] = model.sharded_state_dict(prefix=key_prefix)
    loaded = dist_checkpointing.load(state, str(weights))
    values = {name.removeprefix(key_prefix): loaded[name] for name in state if "_extra_state" not in name}
    missing, unexpected = model.load_state_dict(values, strict=False)
    # Megatron's layers list an `_extra_state` without content, which checkpoints may omit.
    left = [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    assert not left, f"dist_checkpointing.load should have refused: {left}"
    return model.eval()


@torch.no_grad()
def logits(model: GPTModel, tokens: Tensor, *, vocab_size: int) -> Tensor:
    """The model's logits [batch, sequence, vocab_size] in fp32 for token ids [batch, sequence], padding cut off."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    local = model(tokens, positions, None)  # [batch, sequence, rows on this rank]
    return gather_from_tensor_model_parallel_region(local)[..., :vocab_size].float()
