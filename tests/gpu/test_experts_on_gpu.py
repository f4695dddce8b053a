"""A layer of experts at the sizes of real models: outputs and gradients against fp32, and a loop over the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_loop import use_loop
from gradients import one_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.config.schema import Fp8, ModelShape
from pretrainkit.megatron import features as megatron_features
from pretrainkit.megatron import layer_spec
from pretrainkit.megatron import model as megatron_model
from pretrainkit.megatron.fp8 import gemm, weights
from pretrainkit.megatron.fp8.quantize import FORWARD, Scaling
from pretrainkit.models.megatron_fields import transformer_config_fields

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = ["one_rank"]
in_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != gemm.GROUPED_CAPABILITY,
    reason="needs a GPU with grouped FP8 products",
)

TOKENS = 4096
OF_GPT_OSS = LayerFeatures(activation="clamped_swiglu", swiglu_limit=7.0, swiglu_alpha=1.702, mlp_bias=True)
SIZES: dict[str, tuple[int, int, int, int, LayerFeatures]] = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, LLAMA),
    "Mixtral 8x7B": (8, 2, 4096, 14336, LLAMA),
    "gpt-oss-20b": (32, 4, 2880, 2880, OF_GPT_OSS),
}


def _layer(name: str, precision: str) -> Any:
    """The MLP of a layer of the model, with the same weights at every call; `precision` may be fp8."""
    experts, chosen, hidden, ffn, features = SIZES[name]
    shape = ModelShape(
        family="qwen3-moe",
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=32,
        num_query_groups=4,
        head_dim=128,
        vocab_size=32000,
        max_position_embeddings=TOKENS,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        num_experts=experts,
        experts_per_token=chosen,
        expert_ffn_hidden_size=ffn,
        features=features,
    )
    fp8, precision = (Fp8(), "bf16") if precision == "fp8" else (None, precision)
    fields = {**transformer_config_fields(shape), **megatron_model.precision_fields(precision)}
    fields |= megatron_features.config_fields(LLAMA, 1) | megatron_model.expert_fields(shape, expert=1, expert_tensor=1)
    config = TransformerConfig(**fields)
    spec = layer_spec.torch_layer_spec(config, features=features, fp8=fp8).layer_specs[0].submodules.mlp
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=config, pg_collection=groups).cuda()
    layer.set_layer_number(1)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(layer.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, device="cuda") * hidden**-0.5
            parameter.copy_(values.to(torch.bfloat16))
    weights.expire()
    return layer


def _computed(layer: Any) -> dict[str, Tensor]:
    """The output, how tokens are routed, and gradients, by name."""
    generator = torch.Generator("cuda").manual_seed(1)
    dtype, size = next(layer.parameters()).dtype, layer.config.hidden_size
    hidden, above = torch.randn((2, TOKENS, 1, size), generator=generator, device="cuda").to(torch.bfloat16).to(dtype)
    hidden.requires_grad_()
    routes: list[Tensor] = []
    layer.router.register_forward_hook(lambda _, __, output: routes.append(output[1].detach()))
    output, _ = layer(hidden)
    (output * above).sum().backward()
    found = {"output": output.detach(), "hidden": hidden.grad, "routes": routes[0]}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("name", SIZES)
def test_experts_are_as_near_to_fp32_as_a_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = _computed(_layer(name, "bf16"))
    again = _computed(_layer(name, "bf16"))
    use_loop(monkeypatch.setattr)
    looped, exact = _computed(_layer(name, "bf16")), _computed(_layer(name, "fp32"))
    assert torch.equal(grouped["routes"], looped["routes"]) and torch.equal(grouped["routes"], exact["routes"])
    for part, value in exact.items():
        if part == "routes":
            continue
        assert torch.equal(grouped[part], again[part]), f"{part} differs from one time to another"
        errors = [((found[part].float() - value).norm() / value.norm()).item() for found in (looped, grouped)]
        print(f"{name}, {part}: relative error {errors[0]:.5f} in a loop, {errors[1]:.5f} grouped")
        assert errors[1] <= 1.3 * errors[0] + 1e-4, part  # a bias is added to a rounded product


MAX_ERRORS = {"output": 0.08, "linear_fc1.weight": 0.07, "linear_fc2.weight": 0.07}
"""Of experts in FP8, with 3 bits of mantissa: relative, against fp32; of others 0.1."""


@in_fp8
@pytest.mark.parametrize("name", SIZES)
def test_experts_in_fp8_are_near_fp32(name: str) -> None:
    found, again, exact = (_computed(_layer(name, precision)) for precision in ("fp8", "fp8", "fp32"))
    assert torch.equal(found["routes"], exact["routes"])
    for part, value in exact.items():
        if part == "routes":
            continue
        assert torch.equal(found[part], again[part]), f"{part} differs from one time to another"
        error = ((found[part].float() - value).norm() / value.norm()).item()
        print(f"{name}, {part}: relative error {error:.5f} in FP8")
        assert 0 < error < MAX_ERRORS.get(part.removeprefix("experts."), 0.1), part


@in_fp8
@pytest.mark.parametrize("name", SIZES)
def test_gradients_in_fp8_are_added_to_megatrons_buffer(name: str) -> None:
    """By cuBLAS with few experts, by Triton with many; the buffer is that of a training."""
    layer, found = _layer(name, "fp8"), _computed(_layer(name, "fp8"))
    for weight in (layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight):
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape, device="cuda"), False
    assert torch.equal(_computed(layer)["output"], found["output"])
    for part in ("experts.linear_fc1.weight", "experts.linear_fc2.weight"):
        added, expected = layer.get_parameter(part).main_grad - 1, found[part].float()
        assert (added - expected).norm() < 0.01 * expected.norm()  # it was rounded to bf16


@in_fp8
@pytest.mark.parametrize("sizes", [(5, 0, 9, 2), (0, 1, 0, 1), (300, 17, 0, 1731), (0, 0, 0, 2048)], ids=str)
def test_grouped_fp8_products_are_those_of_a_loop(sizes: tuple[int, ...]) -> None:
    generator, ends = torch.Generator("cuda").manual_seed(0), torch.tensor(sizes).cumsum(0)
    values = torch.randn((int(ends[-1]), 768), generator=generator, device="cuda").bfloat16()
    matrices = torch.randn((4 * 1024, 768), generator=generator, device="cuda").bfloat16()
    rows, right = Scaling().cast(values, FORWARD), Scaling().cast(matrices, FORWARD)
    found = gemm.grouped_matmul(rows, right, ends.to("cuda", torch.int32), fast=gemm.FAST_FORWARD)
    parts = zip(rows.exact().split(sizes), right.exact().split(1024), strict=True)
    expected = torch.cat([part @ matrix.t() for part, matrix in parts])
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert (found - expected).norm() < 4e-3 * expected.norm()  # fast accumulation, and bf16


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=in_fp8)])
def test_a_layer_does_not_wait_for_the_gpu(precision: str) -> None:
    layer = _layer("Qwen3-30B-A3B", precision)
    _computed(layer)  # compiles
    hidden = torch.randn((TOKENS, 1, 2048), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights.expire()  # they are cast again
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = layer(hidden)
        output.backward(output.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None
