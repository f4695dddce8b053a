from __future__ import annotations

import pytest
import torch
from delta_net_cases import by_megatron, by_token, rule_inputs

from pretrainkit.config.layer_features import DeltaNet
from pretrainkit.megatron.delta_rule import gated_delta_rule


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_the_rule_and_its_gradients_are_those_of_its_definition_and_of_megatron(length: int) -> None:
    inputs = rule_inputs(DeltaNet(2, 6, 16, 12, 4), 2, length, torch.float32, "cpu")
    in_fp64 = [part.detach().double().requires_grad_() for part in inputs]
    exact = by_token(*in_fp64)
    above = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    wanted = [exact, *torch.autograd.grad(exact, in_fp64, above.double())]
    for rule in (gated_delta_rule, by_megatron):
        out = rule(*inputs)
        for found, expected in zip((out, *torch.autograd.grad(out, inputs, above)), wanted, strict=True):
            assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-5
