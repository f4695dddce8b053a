"""`layer_features.Routing` in Megatron-core's terms: config fields, groups of experts, and counts for their biases."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from pretrainkit.config.layer_features import Routing


def config_fields(routing: Routing) -> dict[str, Any]:
    """The fields of TransformerConfig for a routing; groups are `GroupLimitedTopK`'s."""
    return {
        "moe_router_score_function": routing.score_function,
        "moe_router_enable_expert_bias": routing.expert_bias,
        "moe_router_topk_scaling_factor": routing.scaling_factor if routing.scaling_factor != 1 else None,
        "moe_router_load_balancing_type": "seq_aux_loss" if routing.aux_loss_by_sequence else "aux_loss",
    }


class GroupLimitedTopK:
    """Chooses experts of a token's best groups.

    Megatron's own function takes a group's score from top-k / groups experts: two in DeepSeek-V3, and not one, as
    DeepSeek-V2 has it. This is in the place of RouterReplay, which a router asks where it is given one.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def get_replay_topk(self, scores: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
        """The largest scores [t, topk] of scores [t, experts] in the best groups, and the numbers of their experts."""
        routing = self._routing
        groups = scores.unflatten(1, (routing.num_groups, -1))
        of_groups = groups.topk(routing.experts_per_group_score, -1).values.sum(-1)  # [t, groups]
        chosen = torch.zeros_like(of_groups, dtype=torch.bool)
        chosen.scatter_(1, of_groups.topk(routing.topk_groups, 1).indices, True)
        values, experts = groups.masked_fill(~chosen[..., None], -torch.inf).flatten(1).topk(topk, 1)
        return values, experts


def prepare_router(router: TopKRouter, routing: Routing) -> None:
    """Give a router of Megatron-core its groups; tokens of experts are counted in whole numbers.

    Megatron counts in a buffer of floats, which a model in bf16 has in bf16, where 256 + 1 = 256.
    """
    if routing.num_groups > 1:
        router.router_replay = GroupLimitedTopK(routing)
    if routing.expert_bias:
        router.local_tokens_per_expert = router.local_tokens_per_expert.long()
