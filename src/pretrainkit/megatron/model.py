"""A Megatron-core model with a checkpoint's weights, to compare its logits and losses with other implementations'.

It has the modules that training uses, at any tensor parallel size, without a trainer and NeMo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.schema import Kernels, ModelShape
from pretrainkit.megatron.kernels import config_fields
from pretrainkit.megatron.layer_spec import torch_layer_spec
from pretrainkit.megatron.model_config import precision_fields, scaled_inverse_frequencies
from pretrainkit.models.megatron_fields import transformer_config_fields


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
    with_transformer_engine: bool = False,
    kernels: Kernels | None = None,
) -> GPTModel:
    """This rank's part of the model, with random weights; `patches.apply_kernels` has been called for `kernels`."""
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    fields = {**transformer_config_fields(shape), **precision_fields(precision)}
    if shape.num_experts:
        fields |= {
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "moe_token_dispatcher_type": "allgather",  # the one that needs no CUDA
            "moe_grouped_gemm": False,
            "sequence_parallel": tensor_parallel_size > 1,  # Megatron requires it with experts
        }
    config = TransformerConfig(**fields, tensor_model_parallel_size=tensor_parallel_size)
    if kernels:
        for name, value in config_fields(kernels, qk_norm=shape.qk_norm).items():
            setattr(config, name, value)
    if with_transformer_engine:
        spec: Any = get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm
        )
    else:
        spec = torch_layer_spec(config, fused_norm=kernels is not None and kernels.norm == "triton")
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size,
        max_sequence_length=sequence_length,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    if shape.rope_scaling:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = scaled_inverse_frequencies(rotary.inv_freq, shape.rope_scaling)
    return model


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
