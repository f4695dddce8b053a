"""A whole model's loss and gradients on a GPU, with given kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from pretrainkit.config.schema import Kernels, ModelShape
from pretrainkit.megatron import model as megatron_model

SHAPE = ModelShape(
    family="llama",
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1408,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=64,
    vocab_size=32000,
    max_position_embeddings=2048,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LENGTH = 1024


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """NCCL of one rank; skipped tests don't need it."""
    if not torch.cuda.is_available():
        yield
        return
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    megatron_model.initialize()
    yield
    parallel_state.destroy_model_parallel()  # the next file makes its own groups
    torch.distributed.destroy_process_group()


def gradients(
    shape: ModelShape, precision: str, chosen: Kernels | None, recompute: str = "none"
) -> tuple[float, dict[str, Tensor]]:
    """Loss and fp32 gradients of one fixed batch with fixed weights."""
    torch.manual_seed(0)
    model: Any = megatron_model.build_model(
        shape, padded_vocab_size=shape.vocab_size, sequence_length=LENGTH, precision=precision, kernels=chosen
    ).cuda()
    if recompute == "full":
        config = model.decoder.config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", 2
    for layer in model.decoder.layers:
        layer.recompute_mlp = recompute == "mlp"
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        values = 0.02 * torch.randn(parameter.shape, generator=generator) + ("norm" in name)
        parameter.data.copy_(values.to(torch.bfloat16))
        parameter.grad_added_to_main_grad = False
        if chosen:  # as Megatron's data parallel wrapper has it
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    tokens = torch.randint(shape.vocab_size, (2, LENGTH + 1), generator=generator).cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    found = {
        name: parameter.main_grad if parameter.grad_added_to_main_grad else parameter.grad.float()
        for name, parameter in model.named_parameters()
    }
    return loss.item(), found
