"""Megatron's MoE layer and its all-to-all dispatcher, without Transformer Engine.

A rank's tokens go to the ranks of their experts and come back as sums: a token that has several experts on one rank is
sent there once, with its probabilities, where Megatron's dispatcher sends it once for each. Rows are made for each
expert where the experts are. On one rank nothing waits for the GPU; with more, only the sizes of the exchange do.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from pretrainkit.megatron.permutation import Permutation

NOT_ROUTED = -1.0
"""In place of the probability of an expert that a token doesn't have."""


class GroupedMoELayer(MoELayer):
    """A router, this rank's experts, and the dispatcher between them."""

    def __init__(self, *args: Any, multiplier: float = 1.0, **kwargs: Any) -> None:
        """`multiplier` is that of the layer's output."""
        super().__init__(*args, **kwargs)
        self._multiplier = multiplier
        groups = kwargs.get("pg_collection") or get_default_pg_collection()
        self.token_dispatcher = TokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
        )

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output * self._multiplier if self._multiplier != 1 else output, bias


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens to the ranks of their experts and back; dropless.

    Letters: T tokens of this rank, E experts, e of them on each rank; U tokens that this rank has got, R rows of
    its experts (a token for each of them), h hidden size.
    """

    input_splits: Any
    """Tokens that this rank sends to each of its expert-parallel ranks."""
    output_splits: Any
    """Tokens that it gets from each."""
    output_splits_tp: Any
    """Tokens that each of its expert-tensor-parallel ranks gets so."""
    _sent: Permutation | None
    """Of tokens to ranks; None without other ranks."""
    _permutation: Permutation
    """Of the tokens that this rank has got to its experts."""
    _num_rows: int

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [.., h], routing_map and probs [T, E] to what is sent: tokens, and their probabilities [.., e].

        Both are sorted by rank; probabilities are NOT_ROUTED where a token doesn't have an expert.
        """
        self.hidden_shape = hidden_states.shape
        hidden = hidden_states.view(-1, self.hidden_shape[-1])
        shares = torch.where(routing_map, probs, NOT_ROUTED)
        self._sent, self._num_rows = None, len(hidden) * self.config.moe_router_topk
        if self.ep_size == self.tp_size == 1:
            return hidden, shares
        to_ranks = routing_map.view(len(hidden), self.ep_size, -1).any(-1)
        self._count(routing_map, to_ranks)
        self._sent = Permutation.of(to_ranks, sum(self.input_splits))
        by_rank = shares.reshape(len(hidden) * self.ep_size, -1)
        return self._sent.rows(hidden), by_rank.index_select(0, self._sent.place_of_row)

    def _count(self, routing_map: Tensor, to_ranks: Tensor) -> None:
        """Let all ranks know how many tokens each sends, from routing_map [T, E] and to_ranks [T, ranks]."""
        to_each = to_ranks.sum(0)
        counts = torch.cat((routing_map.sum(0), to_each))
        of_all = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
        of_all = of_all.view(self.ep_size, self.tp_size, -1)
        rank, first = self.ep_group.rank(), self.local_expert_indices[0]
        num_rows = of_all[:, :, first : first + self.num_local_experts].sum()
        sent = of_all[:, :, self.num_experts + rank]  # [EP, ETP]
        numbers = torch.cat((to_each, sent.reshape(-1), num_rows.view(1))).tolist()  # waits for the device
        self.input_splits, sent_by = numbers[: self.ep_size], numbers[self.ep_size : -1]
        self.output_splits = sent_by[self.tp_group.rank() :: self.tp_size]
        self.output_splits_tp = [sum(sent_by[rank :: self.tp_size]) for rank in range(self.tp_size)]
        self._num_rows = numbers[-1]

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens and their probabilities with the ranks that have the experts."""
        if self._sent is None:
            return permutated_local_input_tokens, permuted_probs
        sizes = self.output_splits, self.input_splits
        tokens = all_to_all(self.ep_group, permutated_local_input_tokens, *sizes)
        return tokens, all_to_all(self.ep_group, permuted_probs, *sizes)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [U, h] and probabilities [U, e] to rows [R, h] sorted by expert, their number, their probability."""
        tokens, shares = global_input_tokens, global_probs
        if self.tp_size > 1:
            settings = {"group": self.tp_group, "output_split_sizes": self.output_splits_tp}
            tokens = gather_from_sequence_parallel_region(tokens, **settings)
            shares = gather_from_sequence_parallel_region(shares, **settings)
        routing_map = shares >= 0
        self._permutation = Permutation.of(routing_map, self._num_rows)
        return self._permutation.rows(tokens), routing_map.sum(0), self._permutation.shares(shares)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' outputs [R, h] to their sums by token [U, h]."""
        sums = self._permutation.sums(hidden_states)
        if self.tp_size > 1:
            sums = reduce_scatter_to_sequence_parallel_region(
                sums, group=self.tp_group, input_split_sizes=self.output_splits_tp
            )
        return sums

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Send the sums back to the ranks of the tokens."""
        if self._sent is None:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """The sum of what all ranks have sent for each token [.., h]."""
        sums = permutated_local_input_tokens
        return (self._sent.sums(sums) if self._sent else sums).view(self.hidden_shape)
