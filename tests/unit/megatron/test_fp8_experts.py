"""Experts in FP8, emulated on the CPU: products, copies of weights, gradients, groups of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pretrainkit.megatron.experts import GroupedLinear, _GroupedMatmul
from pretrainkit.megatron.fp8 import gemm, weights
from pretrainkit.megatron.fp8.experts import Fp8GroupedLinear, _Fp8GroupedMatmul
from pretrainkit.megatron.fp8.module import in_bf16
from pretrainkit.megatron.fp8.quantize import FORWARD, Fp8Tensor, Scaling
from pretrainkit.megatron.fp8.stats import Stats
from pretrainkit.megatron.fp8.weights import Fp8ExpertWeight

EXPERTS, OUTPUTS, INPUTS = 4, 48, 32
SIZES = [(5, 0, 9, 2), (16, 0, 0, 0), (0, 1, 0, 1), (4, 4, 4, 4)]


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator).exp()
    ).bfloat16()


def _weight(*, has_buffer: bool = False) -> Any:
    weight: Any = torch.nn.Parameter(_random(EXPERTS, OUTPUTS, INPUTS, seed=1))
    if has_buffer:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    return weight


def _ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def _copies(weight: Tensor) -> Fp8ExpertWeight:
    weights.expire()
    copies = Fp8ExpertWeight(Scaling())
    copies.update(weight)
    return copies


def _in_fp8(rows: Tensor, weight: Any, ends: Tensor) -> Tensor:
    output: Tensor = _Fp8GroupedMatmul.apply(rows, weight, ends, None, _copies(weight), Stats())
    return output


def _loop(rows: Fp8Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Products of what the values stand for: rows [t, k] and matrices [e, n, k]."""
    starts, exact = [0, *ends.tolist()[:-1]], rows.exact().double()
    parts = [exact[a:b] @ m.double().t() for a, b, m in zip(starts, ends.tolist(), matrices, strict=True)]
    return torch.cat(parts)


def test_copies_of_experts_are_scaled_by_output_row_and_by_input_column(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight()
    copies = _copies(weight)
    rows, columns = copies.rows, copies.columns
    for expert, matrix in enumerate(weight.detach()):
        for copy, cast in ((rows, Scaling().cast(matrix, FORWARD)), (columns, Scaling().cast(matrix.t(), FORWARD))):
            part = slice(expert * len(cast.scales), (expert + 1) * len(cast.scales))
            assert torch.equal(copy.scales[part], cast.scales)
            assert torch.equal(copy.exact()[part], cast.exact())
    assert len(set(rows.scales.tolist())) > 1 and len(set(columns.scales.tolist())) > 1
    for limit in (1, 3 * OUTPUTS * INPUTS):  # an expert at a time, and three: the last has fewer
        monkeypatch.setattr(weights, "MAX_TRANSPOSED", limit)
        assert torch.equal(_copies(weight).columns.exact(), columns.exact())


def test_copies_of_experts_are_made_once_a_step() -> None:
    weight = _weight()
    copies = _copies(weight)
    first, addresses = copies.columns.exact().clone(), (copies.rows.values.data_ptr(), copies.columns.values.data_ptr())
    weight.data.mul_(3.0)  # past torch's version counter, as Megatron's optimizer does
    copies.update(weight)
    assert torch.equal(copies.columns.exact(), first)
    weights.expire()
    copies.update(weight)
    assert torch.equal(copies.columns.exact(), _copies(weight).columns.exact())
    assert not torch.equal(copies.columns.exact(), first)
    assert (copies.rows.values.data_ptr(), copies.columns.values.data_ptr()) == addresses


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_what_the_matrices_stand_for(sizes: tuple[int, ...]) -> None:
    weight, ends = _weight(), _ends(sizes)
    rows = _random(int(ends[-1]), INPUTS).requires_grad_()
    above = _random(len(rows), OUTPUTS, seed=2)
    copies = _copies(weight)
    output = _in_fp8(rows, weight, ends)
    output.backward(above)
    expected = _loop(Scaling().cast(rows.detach(), FORWARD), copies.rows.exact().view_as(weight), ends)
    assert output.dtype == torch.bfloat16 and rows.grad is not None
    torch.testing.assert_close(output.detach().double(), expected, rtol=2**-8, atol=1e-5)
    matrices = copies.columns.exact().view(EXPERTS, INPUTS, OUTPUTS)
    of_rows = _loop(Scaling().cast(above, FORWARD), matrices, ends)
    torch.testing.assert_close(rows.grad.double(), of_rows, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_they_are_near_those_of_bf16(sizes: tuple[int, ...]) -> None:
    ends = _ends(sizes)
    found = {}
    for product in (_in_fp8, _GroupedMatmul.apply):
        rows = _random(int(ends[-1]), INPUTS).requires_grad_()
        output = product(rows, _weight(), ends)
        output.backward(_random(len(rows), OUTPUTS, seed=2))
        found[product] = output.detach(), rows.grad
    for ours, theirs in zip(found[_in_fp8], found[_GroupedMatmul.apply], strict=True):
        assert 0.005 < (ours - theirs).float().norm() / theirs.float().norm() < 0.08


@pytest.mark.parametrize("has_buffer", [True, False])
def test_gradients_of_weights_are_those_of_bf16(has_buffer: bool) -> None:
    ends, found = _ends(SIZES[0]), []
    for product in (_in_fp8, _GroupedMatmul.apply):
        weight = _weight(has_buffer=has_buffer)
        product(_random(16, INPUTS), weight, ends).backward(_random(16, OUTPUTS, seed=2))
        found.append(weight.main_grad if has_buffer else weight.grad)
        assert not has_buffer or weight.grad_added_to_main_grad
    assert torch.equal(*found)
    assert (found[0][1] == (1 if has_buffer else 0)).all()  # the expert without rows
    assert not (found[0][0] == (1 if has_buffer else 0)).all()


@pytest.mark.parametrize("has_buffer", [True, False])
def test_experts_may_have_no_token(has_buffer: bool) -> None:
    weight = _weight(has_buffer=has_buffer)
    rows = torch.zeros((0, INPUTS), dtype=torch.bfloat16, requires_grad=True)
    output = _in_fp8(rows, weight, _ends((0, 0, 0, 0)))
    assert output.shape == (0, OUTPUTS) and output.dtype == torch.bfloat16
    output.sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, INPUTS)
    if has_buffer:
        assert weight.grad_added_to_main_grad and torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))
    else:
        assert weight.grad is not None and not weight.grad.any()


def test_a_value_that_is_not_finite_is_never_saturated() -> None:
    weight, rows = _weight(), _random(16, INPUTS)
    rows[6, 3] = torch.inf
    output = _in_fp8(rows, weight, _ends((5, 0, 9, 2)))
    assert output[6].isnan().all() and output[torch.arange(16) != 6].isfinite().all()


@pytest.fixture
def linear() -> Fp8GroupedLinear:
    """Without Megatron's ranks."""
    weights.expire()
    linear = Fp8GroupedLinear.__new__(Fp8GroupedLinear)
    torch.nn.Module.__init__(linear)
    linear.weight, linear.bias = _weight(), None
    linear.copies, linear.stats = Fp8ExpertWeight(Scaling()), Stats()
    return linear


def test_a_layer_notes_its_casts_and_can_compute_in_bf16(linear: Fp8GroupedLinear) -> None:
    rows, ends = _random(16, INPUTS), _ends((5, 0, 9, 2))
    with in_bf16():
        bf16 = linear(rows, ends)
    assert not linear.stats.read()
    assert torch.equal(bf16, GroupedLinear.forward(linear, rows, ends))
    fp8 = linear(rows.requires_grad_(), ends)
    fp8.sum().backward()
    assert not torch.equal(fp8, bf16)
    assert set(linear.stats.read()) == {"input", "output gradient"}
    assert not any(range_.not_finite for range_ in linear.stats.read().values())


def test_experts_stay_in_bf16_where_the_device_has_no_grouped_products(
    linear: Fp8GroupedLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ends = _random(16, INPUTS), _ends((5, 0, 9, 2))
    with in_bf16():
        bf16 = linear(rows, ends)
    for capability, is_fp8 in (((8, 0), True), ((8, 9), False), ((10, 0), False), ((12, 0), False)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            patch.setattr(gemm, "on_fp8_unit", lambda tensor, found=capability: found >= (8, 9))
            assert torch.equal(linear(rows, ends), bf16) is not is_fp8
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(gemm, "on_fp8_unit", lambda tensor: True)
        assert gemm.has_grouped_products(rows)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
def test_a_warning_says_where_experts_stay_in_bf16(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "This GPU")
    monkeypatch.setattr(gemm.log, "handlers", [caplog.handler])
    gemm.check_device(emulates=True, has_experts=False)
    assert not caplog.messages
    gemm.check_device(emulates=True, has_experts=True)
    said = [message for message in caplog.messages if "experts stay in bf16" in message]
    assert bool(said) is (capability in ((8, 9), (10, 0)))
    assert all(message.endswith(f"This GPU has {capability[0]}.{capability[1]}") for message in said)
