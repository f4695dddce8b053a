"""FP8 emulated on the CPU: scales, underflow, values that aren't finite, the copies of weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrainkit.megatron.fp8 import gemm, weights
from pretrainkit.megatron.fp8.quantize import LARGEST, Fp8Tensor, Scaling, norm_gradients, transpose
from pretrainkit.megatron.fp8.stats import Range, Stats, merged
from pretrainkit.megatron.fp8.weights import Fp8Weight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half the distance of neighbours, of the larger one's size."""


@pytest.fixture
def values() -> Tensor:
    """Rows of very different sizes, one of zeros, in bf16 [20, 48]."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((20, 48), generator=generator) * torch.logspace(-12, 12, 20)[:, None]
    values[3] = 0
    return values.bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_row_is_scaled_by_the_smallest_power_of_two_that_fits(values: Tensor, dtype: torch.dtype) -> None:
    cast = Scaling().cast(values, dtype)
    for row, scale in zip(values.float(), cast.scales.tolist(), strict=True):
        assert math.log2(scale) == round(math.log2(scale))
        largest = row.abs().max().item()
        assert largest / scale <= LARGEST[dtype]
        assert largest == 0 or largest / (scale / 2) > LARGEST[dtype]
    exact, rounded = values.float(), cast.exact()
    assert ((rounded - exact).abs() <= RELATIVE[dtype] * exact.abs() + cast.scales[:, None] * 2.0**-9).all()


def test_one_scale_for_a_tensor_is_that_of_its_largest_value(values: Tensor) -> None:
    cast = Scaling(by_tensor=True).cast(values, E4M3)
    assert cast.scales.tolist() == [Scaling().cast(values, E4M3).scales.max().item()]
    largest = values.abs().max().item()
    assert cast.exact().abs().max().item() == pytest.approx(largest, rel=2**-4)


def test_a_transposed_copy_stands_for_the_same(values: Tensor) -> None:
    near = values * (1 / values.float().abs().amax(1, keepdim=True).clamp(min=1e-30)).bfloat16()
    cast = Scaling().cast(near, E4M3)
    turned = transpose(cast)
    assert turned.values.shape == (48, 20)
    assert len(set(turned.scales.tolist())) == 1
    small = turned.scales[0] * 2.0**-9
    assert ((turned.exact() - cast.exact().t()).abs() <= small / 2).all()
    assert torch.equal(transpose(turned).exact().t(), turned.exact())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_never_saturated(values: Tensor, value: float) -> None:
    values[5, 7] = value
    other = Scaling().cast(torch.ones((16, 48), dtype=torch.bfloat16), E4M3)
    cast = Scaling().cast(values, E4M3)
    product = gemm.matmul(cast, other)
    assert product[5].isnan().all()
    assert product[torch.arange(20) != 5].isfinite().all()
    assert transpose(cast).scales.isnan().all()
    assert gemm.matmul(Scaling(by_tensor=True).cast(values, E4M3), other).isnan().all()


def test_underflow_is_counted_in_every_sixteenth_row() -> None:
    values = torch.ones((33, 64))
    values[0, :10], values[1, :20], values[16, :5], values[32, :] = 1e-6, 1e-6, 1e-6, 0
    values[0, 63] = 448.0
    stats = Stats()
    buffer = stats.of("input", values)
    Scaling().cast(values.bfloat16(), E4M3, buffer)
    assert buffer[1, ::16].tolist() == [10, 5, 0]
    assert stats.of("input", values) is buffer
    assert stats.of("input", values[:20]) is not buffer  # a microbatch of another size


def test_ranges_of_layers_are_merged() -> None:
    stats, values = Stats(), torch.full((32, 64), 3.5)
    values[1], values[2] = 0, 7.0
    values[4, 1] = math.nan
    Scaling().cast(values, E4M3, stats.of("input", values))
    (found,) = stats.read().values()
    assert found == Range(smallest_scale=-7.0, largest_scale=-6.0, underflow=0.0, not_finite=1)
    other = Range(-9.0, -8.0, 0.25, 0)
    assert merged([{"fc1 input": found}, {"fc1 input": other, "qkv input": other}]) == {
        "fc1 input": Range(-9.0, -6.0, 0.25, 1),
        "qkv input": other,
    }


def test_products_are_those_of_what_the_matrices_stand_for(values: Tensor) -> None:
    right = torch.randn((32, 48), generator=torch.Generator().manual_seed(1)).bfloat16()
    for scaling in (Scaling(), Scaling(by_tensor=True)):
        a, b = scaling.cast(values, E4M3), scaling.cast(right, E4M3)
        exact = a.exact().double() @ b.exact().double().t()
        torch.testing.assert_close(gemm.matmul(a, b).double(), exact, rtol=2**-8, atol=0)
        out = torch.randn((20, 32), generator=torch.Generator().manual_seed(2))
        expected = out.double() + exact
        gemm.add_matmul(out, a, b)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_fused_functions_round_once() -> None:
    """In FP8 they give what casting the exact result gives, not its bf16 rounding."""
    generator = torch.Generator().manual_seed(3)
    hidden, gate_up, above = (torch.randn((8, n), generator=generator).bfloat16() for n in (32, 64, 32))
    weight = torch.rand(32, generator=generator)
    scaling = Scaling()
    normed, exact, reciprocals = scaling.normalize(hidden, weight, 1e-5, keep=True)
    reference = torch.nn.functional.rms_norm(hidden.float(), (32,), weight, 1e-5)
    _assert_same(normed, scaling.cast(reference, E4M3))
    assert exact is not None
    torch.testing.assert_close(exact.float(), reference, rtol=2**-8, atol=1e-6)
    assert scaling.normalize(hidden, weight, 1e-5, keep=False)[1] is None

    gate_up_32 = gate_up.float().requires_grad_()
    gate, up = gate_up_32.chunk(2, dim=1)
    product = torch.nn.functional.silu(gate) * up
    product.backward(above.float())
    assert gate_up_32.grad is not None
    _assert_same(scaling.swiglu(gate_up, keep=False)[0], scaling.cast(product.detach(), E4M3))
    _assert_same(scaling.swiglu_gradient(above, gate_up, keep=False)[0], scaling.cast(gate_up_32.grad, E4M3))

    hidden_32, weight_32 = hidden.float().requires_grad_(), weight.clone().requires_grad_()
    torch.nn.functional.rms_norm(hidden_32, (32,), weight_32, 1e-5).backward(above.float())
    residual = torch.randn((8, 32), generator=generator).bfloat16()
    of_hidden, of_weight = norm_gradients(hidden, weight, reciprocals, above, residual)
    assert hidden_32.grad is not None and weight_32.grad is not None
    torch.testing.assert_close(of_hidden.float(), hidden_32.grad + residual.float(), rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(of_weight, weight_32.grad, rtol=1e-4, atol=1e-4)


def _assert_same(found: Fp8Tensor, expected: Fp8Tensor) -> None:
    assert torch.equal(found.scales, expected.scales)
    # A last bit of a sigmoid puts a value on the other side of a tie.
    assert (found.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean() < 0.01


@pytest.fixture
def copies() -> Fp8Weight:
    weights.expire()
    return Fp8Weight(Scaling())


def test_copies_of_a_weight_are_made_once_a_step(copies: Fp8Weight) -> None:
    weight = torch.nn.Parameter(torch.randint(1, 8, (16, 32)).float())  # none becomes subnormal in a transposed copy
    copies.update(weight)
    first, address = copies.rows.exact().clone(), copies.rows.values.data_ptr()
    assert torch.equal(copies.columns.exact().t(), first)
    weight.data.mul_(3.0)  # past torch's version counter, as Megatron's optimizer does
    copies.update(weight)
    assert torch.equal(copies.rows.exact(), first)
    weights.expire()
    copies.update(weight)
    assert torch.equal(copies.rows.exact(), Scaling().cast(weight.detach(), E4M3).exact())
    assert torch.equal(copies.columns.exact().t(), copies.rows.exact())
    assert copies.rows.values.data_ptr() == address  # CUDA graphs read there
