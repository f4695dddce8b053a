"""Experts of a token's best groups are those of transformers; tokens of experts are counted in whole numbers."""

from __future__ import annotations

import pytest
import torch

from pretrainkit.config.layer_features import Routing
from pretrainkit.megatron.routing import GroupLimitedTopK, prepare_router

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "n_routed_experts": 24,
    "n_group": 6,
    "topk_group": 2,
}


@pytest.mark.parametrize("version", [2, 3])
def test_chosen_experts_are_those_of_transformers(version: int) -> None:
    import transformers
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(version)
    tokens = torch.randn(500, 16)
    if version == 2:
        router = DeepseekV2TopkRouter(transformers.DeepseekV2Config(**SIZES, topk_method="group_limited_greedy"))
    else:
        router = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**SIZES))
        torch.nn.init.normal_(router.e_score_correction_bias)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, _, expected = router(tokens)
    scores = logits.softmax(-1) if version == 2 else logits.sigmoid() + router.e_score_correction_bias
    routing = Routing(num_groups=6, topk_groups=2, experts_per_group_score=version - 1)
    values, found = GroupLimitedTopK(routing).get_replay_topk(scores, 3)
    assert torch.equal(found.sort().values, expected.sort().values)
    assert torch.equal(values, scores.gather(1, found))
    assert not torch.equal(found.sort().values, scores.topk(3).indices.sort().values)  # groups matter


def test_tokens_are_counted_exactly_in_bf16() -> None:
    router = torch.nn.Module()
    router.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)
    prepare_router(router, Routing("sigmoid", expert_bias=True))  # type: ignore[arg-type]
    router.bfloat16()
    for _ in range(300):
        router.local_tokens_per_expert += torch.ones(4, dtype=torch.int64)
    assert router.local_tokens_per_expert.tolist() == [300] * 4
