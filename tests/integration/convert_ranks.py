"""Real megatron-core models that load what conversion wrote, one function per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build_model(hf_folder: Path, padded_vocab_size: int, sequence_length: int) -> Any:
    """This rank's megatron-core model of a Hugging Face folder, dense or with experts, not yet initialised."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from pretrainkit.models.registry import read_shape
    from pretrainkit.training import layer_spec
    from pretrainkit.training.model_config import scaled_inverse_frequencies, transformer_config_fields

    shape = read_shape(hf_folder)
    fields = transformer_config_fields(shape, precision="fp32", has_transformer_engine=False)
    size = parallel_state.get_tensor_model_parallel_world_size()
    if shape.num_experts:
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_ffn_hidden_size,
            "moe_router_pre_softmax": not shape.norm_topk_prob,
            "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden_size or None,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "sequence_parallel": size > 1,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        }
    config = TransformerConfig(**fields, tensor_model_parallel_size=size)
    if shape.num_experts:
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # megatron-core 0.15 forgets it without Transformer Engine
        layer = get_gpt_layer_local_spec(
            num_experts=shape.num_experts, normalization="RMSNorm", qk_layernorm=shape.qk_norm, moe_grouped_gemm=False
        )
        parts = layer.submodules
        attention = parts.self_attention.submodules
        attention.core_attention = layer_spec.ScaledDotProductAttention
        attention.linear_qkv = layer_spec.RMSNormColumnParallelLinear
        if shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = layer_spec.RMSNorm
        parts.input_layernorm, parts.pre_mlp_layernorm = IdentityOp, layer_spec.RMSNorm
        parts.sharded_state_dict_keys_map = {}
        if shape.shared_expert_ffn_hidden_size:
            parts.mlp.submodules.shared_experts.params["gate"] = True
        spec: Any = TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=layer_spec.RMSNorm)
    else:
        spec = layer_spec.torch_layer_spec(config)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size,
        max_sequence_length=sequence_length,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what isn't loaded shows
    if shape.rope_scaling:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = scaled_inverse_frequencies(rotary.inv_freq, shape.rope_scaling)
    return model


def logits_rank(
    rank: int, world_size: int, *, hf_folder: Path, checkpoint: Path, kind: str, expert: int, tokens_file: Path
) -> None:
    """Write the logits of a converted checkpoint (torch or torch_dist) beside the tokens they are for."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from pretrainkit.checkpoint.transforms import padded_vocabulary
    from pretrainkit.training import megatron_model

    torch.distributed.init_process_group("gloo")
    tensor = world_size // expert
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
    megatron_model.initialize()
    tokens = torch.load(tokens_file)
    padded = padded_vocabulary(263, 128, tensor)
    model = build_model(hf_folder, padded, tokens.size(1))
    if kind == "torch":
        folder = f"mp_rank_{rank:02d}" if expert == 1 else f"mp_rank_00_{rank:03d}"
        stored = torch.load(checkpoint / "release" / folder / "model_optim_rng.pt", weights_only=False)
        state = {_sequential(name): tensor for name, tensor in stored["model"].items()}
    else:
        sharded = model.sharded_state_dict(prefix="")
        loaded = dist_checkpointing.load(sharded, str(checkpoint / "release"))
        state = {name: loaded[name] for name in sharded}
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    assert not left, left
    logits = megatron_model.logits(model.eval(), tokens, vocab_size=263)
    if rank == 0:
        torch.save(logits, tokens_file.with_name("logits.pt"))


def _sequential(name: str) -> str:
    """The name that SequentialMLP has for what TEGroupedMLP, which needs CUDA, calls linear_fc1.weight3."""
    import re

    return re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)
