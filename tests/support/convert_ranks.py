"""Real megatron-core models that load what conversion wrote, one function per rank."""

from __future__ import annotations

from pathlib import Path


def logits_rank(
    rank: int,
    world_size: int,
    *,
    hf_folder: Path,
    checkpoint: Path,
    kind: str,
    expert: int,
    tokens_file: Path,
    local_norms: bool = False,
) -> None:
    """Write the logits of a converted checkpoint (torch or torch_dist), in the folder of their tokens.

    With `local_norms`, torch_dist is read under the names that Megatron's local layer spec asks for.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from pretrainkit.checkpoint.transforms import padded_vocabulary
    from pretrainkit.megatron import model as megatron_model
    from pretrainkit.models.registry import read_shape

    torch.distributed.init_process_group("gloo")
    tensor = world_size // expert
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
    megatron_model.initialize()
    tokens = torch.load(tokens_file)
    padded = padded_vocabulary(263, 128, tensor)
    model = megatron_model.build_model(read_shape(hf_folder), padded_vocab_size=padded, sequence_length=tokens.size(1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what isn't loaded shows
    if kind == "torch":
        folder = f"mp_rank_{rank:02d}" if expert == 1 else f"mp_rank_00_{rank:03d}"
        stored = torch.load(checkpoint / "release" / folder / "model_optim_rng.pt", weights_only=False)
        state = stored["model"]
    else:
        sharded = model.sharded_state_dict(prefix="")
        if local_norms:
            keys = get_gpt_layer_local_spec(num_experts=8).submodules.sharded_state_dict_keys_map
            renamed = {f"decoder.layers.{old}": f"decoder.layers.{new}" for old, new in keys.items()}
            # Of the norms there only these of ours have extra states.
            apply_prefix_mapping({name: part for name, part in sharded.items() if "_extra" not in name}, renamed)
            assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in {part.key for part in sharded.values()}
        loaded = dist_checkpointing.load(sharded, str(checkpoint / "release"))
        state = {name: loaded[name] for name in sharded}
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    assert not left, left
    logits = megatron_model.logits(model.eval(), tokens, vocab_size=263)
    if rank == 0:
        torch.save(logits, tokens_file.with_name("logits.pt"))


def nemo_logits_rank(rank: int, world_size: int, *, hf_folder: Path, checkpoint: Path, tokens_file: Path) -> None:
    """Write the logits of a converted NeMo checkpoint, in the folder of their tokens; the ranks are tensor-parallel."""
    import torch

    from pretrainkit.checkpoint.transforms import padded_vocabulary
    from pretrainkit.megatron import model as megatron_model
    from pretrainkit.models.registry import read_shape

    torch.distributed.init_process_group("gloo")
    megatron_model.initialize(tensor_parallel_size=world_size)
    tokens, shape = torch.load(tokens_file), read_shape(hf_folder)
    rows = padded_vocabulary(shape.vocab_size, 1, world_size)
    settings = {"padded_vocab_size": rows, "sequence_length": tokens.size(1)}
    model = megatron_model.load_model(checkpoint / "weights", shape, **settings)
    logits = megatron_model.logits(model, tokens, vocab_size=shape.vocab_size)
    if rank == 0:
        torch.save(logits, tokens_file.with_name("logits.pt"))


def latent_logits_rank(rank: int, world_size: int, *, checkpoint: Path, tokens_file: Path) -> None:
    """The same of a torch_dist checkpoint of Megatron-LM, by Megatron-core's model that its arguments describe.

    Its own latent attention needs Transformer Engine, but for what is set here.
    """
    import dataclasses
    from typing import Any

    import torch
    import torch.nn.functional as F
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from pretrainkit.megatron import model as megatron_model
    from pretrainkit.megatron import patches
    from pretrainkit.megatron.attention import ScaledDotProductAttention

    class Attention(ScaledDotProductAttention):
        def __init__(self, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    torch.distributed.init_process_group("gloo")
    megatron_model.initialize()
    patches.apply(patches.EXPERTS)
    multi_latent_attention.HAVE_TE = False
    folder, tokens = checkpoint / "release", torch.load(tokens_file)
    arguments = vars(dist_checkpointing.load_common_state_dict(str(folder))["args"])
    arguments |= {"layernorm_epsilon": arguments["norm_epsilon"], "num_moe_experts": arguments["num_experts"]}
    arguments |= {"gated_linear_unit": arguments["swiglu"], "moe_grouped_gemm": False}
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    fields = {name: value for name, value in arguments.items() if name in known}
    config = MLATransformerConfig(**fields | megatron_model.precision_fields("fp32"), activation_func=F.silu)
    config.moe_router_dtype, config.moe_token_dispatcher_type = "fp32", "alltoall"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=arguments["padded_vocab_size"],
        max_sequence_length=tokens.size(1),
        position_embedding_type=arguments["position_embedding_type"],
        rotary_base=arguments["rotary_base"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
    )
    assert isinstance(model.decoder.final_layernorm, WrappedTorchNorm | torch.nn.RMSNorm)
    sharded = {name: part for name, part in model.sharded_state_dict(prefix="").items() if "_extra" not in name}
    dense = [layer for layer, has_experts in enumerate(config.moe_layer_freq) if not has_experts]
    renamed = {
        f"decoder.layers.{layer}.pre_mlp_layernorm.": f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_"
        for layer in dense
    }
    for layer in range(config.num_layers):
        for part in ("q", "kv"):
            attention = f"decoder.layers.{layer}.self_attention."
            renamed[f"{attention}{part}_layernorm."] = f"{attention}linear_{part}_up_proj.layer_norm_"
    apply_prefix_mapping(sharded, renamed)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what isn't loaded shows
    loaded = dist_checkpointing.load(sharded, str(folder))
    missing, unexpected = model.load_state_dict({name: loaded[name] for name in sharded}, strict=False)
    assert not [name for name in (*missing, *unexpected) if "_extra_state" not in name], (missing, unexpected)
    torch.save(megatron_model.logits(model.eval(), tokens, vocab_size=263), tokens_file.with_name("logits.pt"))
