"""What only a GPU can show of the fused kernels: gradients of a whole model, against fp32 and against plain bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from pretrainkit.config.schema import Kernels, ModelShape
from pretrainkit.megatron import kernels, patches
from pretrainkit.megatron import model as megatron_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


def _gradients(
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


@pytest.mark.parametrize(
    ("qk_norm", "tied", "recompute"),
    [
        (False, False, "none"),
        (True, False, "none"),
        (False, True, "none"),
        (False, False, "full"),
        (False, False, "mlp"),
    ],
    ids=["llama", "qk norm", "tied", "layers recomputed", "blocks recomputed"],
)
def test_gradients_of_fused_kernels_are_as_near_to_fp32_as_plain_ones(
    qk_norm: bool, tied: bool, recompute: str
) -> None:
    shape = dataclasses.replace(SHAPE, qk_norm=qk_norm, tie_word_embeddings=tied)
    exact_loss, exact = _gradients(shape, "fp32", None)
    plain_loss, plain = _gradients(shape, "bf16", None)
    chosen = kernels.choose(
        layer_spec="torch",
        fused_kernels="auto",
        accelerator="gpu",
        precision="bf16",
        installed=kernels.installed_libraries(),
    )
    assert kernels.PLAIN not in (
        chosen.norm,
        chosen.rotary,
        chosen.swiglu,
        chosen.cross_entropy,
        chosen.weight_gradient,
    )
    patches.apply_kernels(chosen)
    fused_loss, fused = _gradients(shape, "bf16", chosen, recompute)

    assert abs(fused_loss - exact_loss) <= abs(plain_loss - exact_loss) + 1e-3
    for name, gradient in exact.items():
        scale = gradient.norm()
        plain_error = ((plain[name] - gradient).norm() / scale).item()
        fused_error = ((fused[name] - gradient).norm() / scale).item()
        print(f"{name}: relative error {plain_error:.4f} plain, {fused_error:.4f} fused")
        assert fused_error <= 1.1 * plain_error + 1e-3, name
