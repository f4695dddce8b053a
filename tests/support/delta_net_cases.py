"""Gated delta nets: the rule token by token in fp64; layers of this project and of transformers with equal weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.layer_features import DeltaNet, LayerFeatures
from pretrainkit.megatron.delta_net import GatedDeltaNet
from pretrainkit.megatron.delta_rule import L2_EPS

QWEN3_NEXT = DeltaNet(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, kernel_size=4)
"""Of Qwen3-Next-80B-A3B, whose hidden size is 2048."""


def rule_inputs(net: DeltaNet, batch: int, length: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays, and beta, as a new layer makes them."""
    generator = torch.Generator().manual_seed(0)
    keys = (batch, length, net.num_key_heads, net.key_head_dim)
    values = (batch, length, net.num_value_heads, net.value_head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in (keys, keys, values))
    rates = torch.rand(2, *v.shape[:3], generator=generator)
    q, k, v, beta = (part.to(dtype).to(device) for part in (q, k, v, rates[0]))
    decay = -16 * rates[1].pow(4)  # of some heads almost none, of others almost all
    return [part.requires_grad_() for part in (q, k, v, decay.to(device), beta)]


def by_token(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is defined."""
    query, key = (_normalized(part, value.size(2)) for part in (query, key))
    state = value.new_zeros(*value.shape[:1], *value.shape[2:3], key.size(-1), value.size(-1))
    outs = []
    for q, k, v, g, b in zip(*(part.unbind(1) for part in (query, key, value, log_decay, beta)), strict=True):
        state = state * g.exp()[..., None, None]
        lacking = (v - torch.einsum("bhde,bhd->bhe", state, k)) * b[..., None]
        state = state + torch.einsum("bhd,bhe->bhde", k, lacking)
        outs.append(torch.einsum("bhde,bhd->bhe", state, q) * key.size(-1) ** -0.5)
    return torch.stack(outs, 1)


def by_megatron(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Megatron-core's rule in torch."""
    query, key = (_normalized(part.float(), value.size(2)) for part in (query, key))
    out: Tensor = torch_chunk_gated_delta_rule(query, key, value, g=log_decay, beta=beta)[0].to(value.dtype)
    return out


def _normalized(heads: Tensor, num_heads: int) -> Tensor:
    scaled = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    return scaled.repeat_interleave(num_heads // heads.size(2), 2)


def layers(net: DeltaNet, hidden: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer of this project and transformers', with the same random weights."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=8, params_dtype=dtype, layernorm_epsilon=1e-6
    )
    ours = GatedDeltaNet(
        config, 1, LayerFeatures(delta_net=net, delta_net_layers=(0,)), ProcessGroupCollection.use_mpu_process_groups()
    )
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=hidden,
            linear_num_key_heads=net.num_key_heads,
            linear_num_value_heads=net.num_value_heads,
            linear_key_head_dim=net.key_head_dim,
            linear_value_head_dim=net.value_head_dim,
            linear_conv_kernel_dim=net.kernel_size,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    weights = {name: weight.detach().to(torch.bfloat16).float() for name, weight in theirs.named_parameters()}
    theirs.load_state_dict(weights)
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    return ours, theirs


def with_gradients(layer: Any, hidden: Tensor, above: Tensor, *, tokens_first: bool) -> dict[str, Tensor]:
    """Output [s, b, H] and gradients for an input [s, b, H], in fp32."""
    layer.zero_grad()
    leaf = hidden.detach().clone().requires_grad_()
    out = layer(leaf)[0] if tokens_first else layer(leaf.transpose(0, 1)).transpose(0, 1)
    out.backward(above.to(out.dtype))
    found = {"output": out.detach(), "input": leaf.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: tensor.float() for name, tensor in found.items() if tensor is not None}


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 norm of the difference."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
