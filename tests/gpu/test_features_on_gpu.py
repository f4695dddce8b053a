"""Families whose layers have more than Llama's: transformers' logits, and gradients of the kernels that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradients import LENGTH, gradients, one_rank
from hf_models import FEATURED, MIXTURES, save_random_model

from pretrainkit.checkpoint.convert import convert
from pretrainkit.megatron import kernels, patches
from pretrainkit.megatron import model as megatron_model
from pretrainkit.megatron.window_attention import attend_causally
from pretrainkit.models.registry import read_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = ["one_rank"]


@pytest.mark.parametrize("name", [*FEATURED, *MIXTURES])
def test_logits_are_those_of_transformers_and_gradients_those_of_fp32(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_random_model(name, tmp_path / "hf", seed=0, dtype="float32", max_shard_size="1GB")
    convert(tmp_path / "hf", tmp_path / "nemo")
    shape = read_shape(tmp_path / "hf")
    settings = {"padded_vocab_size": shape.vocab_size, "sequence_length": LENGTH}
    tokens = torch.randint(0, 263, (2, 96), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).cuda()
        expected = reference(tokens).logits
    model = megatron_model.load_model(tmp_path / "nemo" / "weights", shape, **settings).cuda()
    found = megatron_model.logits(model, tokens, vocab_size=shape.vocab_size)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-3

    chosen = kernels.choose(
        layer_spec="torch",
        fused_kernels="auto",
        accelerator="gpu",
        precision="bf16",
        installed=kernels.installed_libraries(),
        features=shape.features,
    )
    exact_loss, exact = gradients(shape, "fp32", None)
    _, plain = gradients(shape, "bf16", None)
    patches.apply_kernels(chosen)
    loss, fused = gradients(shape, "bf16", chosen)
    assert loss == pytest.approx(exact_loss, abs=2e-2)
    # A token that bf16 sends to another expert changes the gradients of two of them.
    factor = 2 if shape.num_experts else 1.5
    for weight, gradient in exact.items():
        scale = gradient.norm().clamp(min=1e-8)
        errors = [((found[weight] - gradient).norm() / scale).item() for found in (plain, fused)]
        print(f"{name}, {weight}: relative error {errors[0]:.4f} plain, {errors[1]:.4f} fused")
        if gradient.numel() > 1:
            assert errors[1] <= factor * errors[0] + 2e-2, weight


@pytest.mark.parametrize(("window", "has_sinks"), [(128, False), (0, True), (128, True)])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 64), ((4, 4), 128), ((8, 4), 256)])
def test_attention_with_windows_and_sinks_is_that_of_scores(
    window: int, has_sinks: bool, heads: tuple[int, int], size: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, count, 700, size) for count in (heads[0], heads[1], heads[1], heads[0])]
    inputs = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    inputs.append(torch.randn(heads[0], generator=generator, device="cuda").bfloat16())
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, above, sinks = (part.to(dtype, copy=True).requires_grad_() for part in inputs)
        out = attend_causally(q, k, v, 0.1, window, 0.0, sinks if has_sinks else None)
        (out * above).sum().backward()
        parts = [q, k, v, *([sinks] if has_sinks else [])]
        found[dtype] = [out.detach(), *(part.grad for part in parts if part.grad is not None)]
    for number, (ours, exact) in enumerate(zip(found[torch.bfloat16], found[torch.float32], strict=True)):
        error = ((ours.float() - exact).norm() / exact.norm()).item()
        print(f"window {window}, sinks {has_sinks}, {number}: {error:.4f}")
        assert error < 1e-2, number
