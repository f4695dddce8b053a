from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pretrainkit.megatron import window_attention
from pretrainkit.megatron.window_attention import attend_causally


@pytest.mark.parametrize("window", [0, 1, 5, 12, 13])
@pytest.mark.parametrize(("length", "total"), [(12, 12), (7, 12)], ids=["all tokens", "the last"])
def test_a_token_attends_to_those_of_its_window(window: int, length: int, total: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 8, generator=generator)
    key, value = (torch.randn(2, 2, total, 8, generator=generator) for _ in range(2))
    distance = torch.arange(total - length, total)[:, None] - torch.arange(total)
    mask = (distance >= 0) & (distance < (window or total))
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend_causally(query, key, value, 0.3, window), wanted)
    uncapped = attend_causally(query, key, value, 0.3, window, softcap=1e4)
    torch.testing.assert_close(uncapped, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attend_causally(query, key, value, 0.3, window, softcap=0.1), wanted) or window == 1


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.5), (9, 0.5), (9, 0.0)])
def test_masks_and_scores_of_many_queries_are_not_kept(
    window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [torch.randn(1, 2, 24, 8, generator=torch.Generator().manual_seed(part)) for part in range(3)]
    found = []
    for most in (window_attention.MAX_QUERIES, 5):
        monkeypatch.setattr(window_attention, "MAX_QUERIES", most)
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            out = attend_causally(q, k, v, 0.3, window, softcap)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert not kept
