"""An embedding's gradient in Megatron's fp32 buffer: the rows that were looked up, each as often as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pretrainkit.megatron.wgrad import embedding

IDS = torch.tensor([[3, 0, 3], [1, 3, 6]])


def _weight(**attributes: Any) -> Any:
    torch.manual_seed(0)
    weight: Any = torch.nn.Parameter(torch.randn(7, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.ones(7, 4)  # of an earlier microbatch
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_added_to_the_buffer(tied: bool) -> None:
    weight = _weight(grad_added_to_main_grad=False, **({"zero_out_wgrad": True} if tied else {}))
    above = torch.randn(2, 3, 4).to(torch.bfloat16)
    rows = embedding(IDS, weight)
    rows.backward(above)

    exact = torch.zeros(7, 4).index_add_(0, IDS.flatten(), above.flatten(0, 1).float())
    assert torch.equal(rows, weight.detach()[IDS])
    torch.testing.assert_close(weight.main_grad, 1 + exact)
    assert weight.grad_added_to_main_grad  # what stands in weight.grad is not to be added
    if tied:  # nor are the zeros that Megatron's output layer would make for a gradient that is added
        assert weight.grad is None and weight.zero_out_wgrad is False
    else:
        assert weight.grad.shape == weight.shape


def test_without_megatrons_buffer_it_is_torchs() -> None:
    weight, plain = _weight(), _weight()
    del weight.main_grad
    embedding(IDS, weight).float().pow(2).sum().backward()
    F.embedding(IDS, plain).float().pow(2).sum().backward()
    assert torch.equal(weight.grad, plain.grad)
