from __future__ import annotations

import copy

import pytest
import torch

from pretrainkit.megatron.optimizer import FusedAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (11,))]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for number, param in enumerate(params):
            param.grad = torch.sin(param.detach() * (step + 2) + number)
        optimizer.step()


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def test_steps_are_those_of_torch() -> None:
    ours, theirs = parameters(), parameters()
    train(FusedAdamW(groups(ours), **SETTINGS), ours, range(20))
    train(torch.optim.AdamW(groups(theirs), **SETTINGS), theirs, range(20))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)
        assert not torch.equal(our, parameters()[0][: len(our)])


def test_continues_from_its_own_state() -> None:
    unbroken = parameters()
    train(FusedAdamW(groups(unbroken), **SETTINGS), unbroken, range(10))
    resumed = parameters()
    first = FusedAdamW(groups(resumed), **SETTINGS)
    train(first, resumed, range(5))
    second = FusedAdamW(groups(resumed), **SETTINGS)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, resumed, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


def test_state_has_the_layout_that_megatron_reshards() -> None:
    params = parameters()
    optimizer = FusedAdamW(groups(params), **SETTINGS)
    train(optimizer, params, range(3))
    assert all(set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"} for param in params)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(group["bias_correction"] for group in optimizer.param_groups)


def test_parameters_without_gradient_stay() -> None:
    params = parameters()
    optimizer = FusedAdamW(groups(params), **SETTINGS)
    params[0].grad = torch.ones_like(params[0])
    before = params[1].clone()
    optimizer.step()
    assert torch.equal(params[1], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_step_moves_by_the_learning_rate(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    param.grad = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=dtype)
    FusedAdamW([param], **SETTINGS).step()
    torch.testing.assert_close(param.data.float(), torch.tensor([-0.01, 0.01, -0.01, 0.01]), rtol=1e-2, atol=1e-4)
