"""Gated delta nets of Qwen3-Next's size: the rule against its definition, and a layer against transformers'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from delta_net_cases import QWEN3_NEXT, by_megatron, by_token, error, layers, rule_inputs, with_gradients
from gradients import one_rank
from torch import Tensor

from pretrainkit.megatron.delta_rule import gated_delta_rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = ["one_rank"]
Rule = Callable[..., Tensor]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rule_is_as_near_to_fp64_as_megatrons(dtype: torch.dtype) -> None:
    inputs = rule_inputs(QWEN3_NEXT, 1, 500, dtype, "cuda")
    in_fp64 = [part.detach().double().requires_grad_() for part in inputs]
    exact = by_token(*in_fp64)
    above = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    wanted = [exact, *torch.autograd.grad(exact, in_fp64, above.double())]
    errors = []
    for rule in (by_megatron, gated_delta_rule):
        out = rule(*inputs)
        found = [out, *torch.autograd.grad(out, inputs, above)]
        errors.append([error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)])
    print(f"{dtype}: relative errors of Megatron-core's {errors[0]}, of ours {errors[1]}")
    for megatrons, ours in zip(*errors, strict=True):
        assert ours <= 1.25 * megatrons + 1e-6


def test_memory_grows_with_the_tokens() -> None:
    peaks = {}
    for name, rule, length in (
        ("Megatron-core", by_megatron, 4096),
        ("ours", gated_delta_rule, 4096),
        ("twice", gated_delta_rule, 8192),
    ):
        inputs = rule_inputs(QWEN3_NEXT, 1, length, torch.bfloat16, "cuda")
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        out = rule(*inputs)
        kept = torch.cuda.memory_allocated() - begin
        torch.autograd.grad(out, inputs, out.detach())
        peaks[name] = torch.cuda.max_memory_allocated() - begin
        times = [_seconds(rule, inputs) for _ in range(3)]
        print(
            f"{name}, {length} tokens: kept {kept / 2**20:.0f} MiB, peak {peaks[name] / 2**20:.0f} MiB, "
            f"forward and backward {1e3 * min(times):.1f} ms"
        )
    assert peaks["twice"] < 2.2 * peaks["ours"]


def _seconds(rule: Rule, inputs: list[Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    out = rule(*inputs)
    torch.autograd.grad(out, inputs, out.detach())
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def test_a_layer_is_as_near_to_fp32_as_transformers() -> None:
    torch.manual_seed(0)
    ours, theirs = layers(QWEN3_NEXT, 2048, torch.bfloat16)
    theirs = theirs.cuda()
    hidden, above = (torch.randn(1000, 2, 2048, device="cuda").bfloat16() for _ in range(2))
    exact = with_gradients(theirs, hidden.float(), above.float(), tokens_first=False)
    in_bf16 = with_gradients(theirs.bfloat16(), hidden, above, tokens_first=False)
    found = with_gradients(ours, hidden, above, tokens_first=True)
    for name, wanted in exact.items():
        errors = error(in_bf16[name], wanted), error(found[name], wanted)
        print(f"{name}: relative error {errors[0]:.4f} of transformers in bf16, {errors[1]:.4f} of ours")
        assert errors[1] <= 1.5 * errors[0] + 2e-3, name
