"""How much work training is: floating-point operations of a model, and what a GPU can do at most."""

from __future__ import annotations

from pretrainkit.config.schema import ModelShape

PEAK_BF16_FLOPS: dict[str, float] = {
    # Dense bf16 without sparsity, from the vendor's datasheets. The longest name found in the device's name counts.
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H800": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
}


def peak_flops(device_name: str) -> float | None:
    """A GPU's dense bf16 peak in FLOP/s by its name, such as 'NVIDIA H100 80GB HBM3'; None when it isn't known."""
    words = device_name.replace("-", " ").split()
    names = [name for name in PEAK_BF16_FLOPS if all(word in words for word in name.split())]
    return PEAK_BF16_FLOPS[max(names, key=len)] if names else None


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that a token is multiplied with: all but input embedding and norms; of experts, those it visits."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    attention = shape.hidden_size * shape.head_dim * (2 * heads + 2 * groups)
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    if shape.num_experts:
        router = shape.hidden_size * shape.num_experts
        visited = shape.expert_ffn_hidden_size * shape.experts_per_token + shape.shared_expert_ffn_hidden_size
        mlp = 3 * shape.hidden_size * visited + router
    return shape.num_layers * (attention + mlp) + shape.hidden_size * shape.vocab_size


def training_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 N + 6 L H S.

    N: matmul_parameters; 2 FLOPs each forward, 4 backward. L layers, H = heads x head size, S tokens: causal
    attention, in which a token sees half the sequence on average. Recomputation is not counted: this is
    the work of the model, so that MFU = this x tokens/s / peak compares implementations
    (https://arxiv.org/abs/2204.02311, appendix B, with causal attention halved).
    """
    attention = 6 * shape.num_layers * shape.num_attention_heads * shape.head_dim * sequence_length
    return 6 * matmul_parameters(shape) + attention
