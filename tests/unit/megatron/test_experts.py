"""Grouped experts compute what a loop over experts does, with groups of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.megatron.experts import _GroupedMatmul, _SplitShares


def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows[a:b] @ matrix.t() for a, b, matrix in zip(starts, ends.tolist(), weight, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [(5, 0, 9, 2), (16, 0, 0, 0), (0, 1, 0, 1), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_are_those_of_a_loop(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = torch.randn((int(ends[-1]), 32), generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn((4, 48, 32), generator=generator).to(dtype))
    above = torch.randn((int(ends[-1]), 48), generator=generator).to(dtype)
    found = {}
    for name, product in (("grouped", _GroupedMatmul.apply), ("loop", _loop)):
        rows.grad = weight.grad = None
        output = product(rows, weight, ends)
        (F.silu(output) * above).sum().backward()
        assert rows.grad is not None and weight.grad is not None
        found[name] = output.detach(), rows.grad, weight.grad
    for grouped, looped in zip(found["grouped"], found["loop"], strict=True):
        torch.testing.assert_close(grouped, looped, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("has_buffer", [True, False])
def test_experts_may_have_no_token(has_buffer: bool) -> None:
    weight = torch.nn.Parameter(torch.randn((3, 16, 32)))
    if has_buffer:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False  # type: ignore[attr-defined]
    rows = torch.randn((0, 32), requires_grad=True)
    out = _GroupedMatmul.apply(rows, weight, torch.zeros(3, dtype=torch.int32))
    assert out.shape == (0, 16)
    out.sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, 32)
    if has_buffer:
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert torch.equal(weight.main_grad, torch.ones_like(weight))  # type: ignore[attr-defined]
    else:
        assert weight.grad is not None and not weight.grad.any()


def test_the_gradient_is_added_to_megatrons_buffer() -> None:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    weight = torch.nn.Parameter(torch.randn((3, 16, 16)))
    rows = torch.randn((8, 16))
    _GroupedMatmul.apply(rows, weight, ends).square().sum().backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad.clone(), None
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False  # type: ignore[attr-defined]
    _GroupedMatmul.apply(rows, weight, ends).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + expected)  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_are_split_without_loss(dtype: torch.dtype) -> None:
    shares = torch.rand(100, requires_grad=True)
    columns = _SplitShares.apply(shares, dtype)
    assert torch.equal(columns.double().sum(1).float(), shares)
    (columns @ torch.ones((8, 1), dtype=dtype)).sum().backward()
    assert shares.grad is not None and torch.equal(shares.grad, torch.ones(100))
