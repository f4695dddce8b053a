"""Rows sorted by expert and back: what Megatron's own functions give, with their gradients."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from torch import Tensor

from pretrainkit.megatron.permutation import Permutation

TOKENS, EXPERTS, HIDDEN = 50, 8, 16


def _routed(experts_per_token: int, popular: int = 0) -> tuple[Tensor, Tensor]:
    """A routing map [T, E] in which expert 7 has no token and all have `popular`, and probabilities [T, E]."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((TOKENS, EXPERTS), generator=generator)
    scores[:, popular], scores[:, 7] = 2, -1
    routing_map = torch.zeros((TOKENS, EXPERTS), dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(experts_per_token).indices, True)
    return routing_map, scores.softmax(1) * routing_map


@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_rows_and_sums_are_those_of_megatron(experts_per_token: int) -> None:
    routing_map, probabilities = _routed(experts_per_token)
    hidden, above = torch.randn((2, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("ours", "megatron"):
        inputs = hidden.clone().requires_grad_(), probabilities.clone().requires_grad_()
        if name == "ours":
            permutation = Permutation.of(routing_map, TOKENS * experts_per_token)
            rows, shares = permutation.rows(inputs[0]), permutation.shares(inputs[1])
            sums = permutation.sums(rows.sin() * shares[:, None])
        else:
            rows, shares, order = permute(inputs[0], routing_map, inputs[1], TOKENS * experts_per_token)
            sums = unpermute(rows.sin() * shares[:, None], order, hidden.shape)
        (sums * above).sum().backward()
        found[name] = rows, shares, sums, inputs[0].grad, inputs[1].grad
    for ours, theirs in zip(found["ours"], found["megatron"], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_sum_of_a_token_does_not_depend_on_others() -> None:
    routing_map, _ = _routed(4)
    rows = torch.randn((TOKENS * 4, HIDDEN), dtype=torch.bfloat16)
    of_all = Permutation.of(routing_map, TOKENS * 4)
    for token in (0, 17, TOKENS - 1):
        own = rows[of_all.by_token[of_all.begins[token] : of_all.begins[token + 1]]]
        assert torch.equal(of_all.sums(rows)[token], Permutation.of(routing_map[token : token + 1], 4).sums(own)[0])


def test_tokens_may_have_any_number_of_experts() -> None:
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)
    permutation = Permutation.of(routing_map, 6)
    assert permutation.token_of_row.tolist() == [0, 2, 2, 3, 0, 2]
    tokens = torch.randn((4, HIDDEN), requires_grad=True)
    sums = permutation.sums(permutation.rows(tokens))
    times = routing_map.sum(1, keepdim=True)
    torch.testing.assert_close(sums, tokens * times)
    sums.sum().backward()
    assert tokens.grad is not None
    torch.testing.assert_close(tokens.grad, times.expand_as(tokens).float())


def test_a_rank_may_have_no_row() -> None:
    permutation = Permutation.of(torch.zeros((3, 4), dtype=torch.bool), 0)
    rows = permutation.rows(torch.randn((3, HIDDEN)))
    assert rows.shape == (0, HIDDEN) and permutation.shares(torch.rand((3, 4))).shape == (0,)
    assert torch.equal(permutation.sums(rows), torch.zeros((3, HIDDEN)))
