"""What only a GPU can show of the fused kernels: gradients of a whole model, against fp32 and against plain bf16."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gradients import SHAPE, gradients, one_rank

from pretrainkit.megatron import kernels, patches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = ["one_rank"]


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
    exact_loss, exact = gradients(shape, "fp32", None)
    plain_loss, plain = gradients(shape, "bf16", None)
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
    fused_loss, fused = gradients(shape, "bf16", chosen, recompute)

    assert abs(fused_loss - exact_loss) <= abs(plain_loss - exact_loss) + 1e-3
    for name, gradient in exact.items():
        scale = gradient.norm()
        plain_error = ((plain[name] - gradient).norm() / scale).item()
        fused_error = ((fused[name] - gradient).norm() / scale).item()
        print(f"{name}: relative error {plain_error:.4f} plain, {fused_error:.4f} fused")
        assert fused_error <= 1.1 * plain_error + 1e-3, name
