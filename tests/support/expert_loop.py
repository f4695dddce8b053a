"""Experts as a loop in torch's own functions, behind Megatron's own dispatcher: what grouped ones are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from pretrainkit.megatron import layer_spec
from pretrainkit.megatron.experts import GroupedExperts, GroupedLinear


def use_loop(setattr_: Any = setattr) -> None:
    """Let layers that are built from now on have such experts; `setattr_` may be a MonkeyPatch's."""
    setattr_(layer_spec, "GroupedMoELayer", MoELayer)
    setattr_(layer_spec, "GroupedExperts", LoopedExperts)


class LoopedExperts(GroupedExperts):
    """The weights of GroupedExperts, an expert after the other."""

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        outs = []
        counts = tokens_per_expert.tolist()
        for number, (part, shares) in enumerate(zip(rows.split(counts), probabilities.split(counts), strict=True)):
            first, second = (self._linear(name, number) for name in ("linear_fc1", "linear_fc2"))
            gate, up = F.linear(part, *first).float().chunk(2, dim=-1)
            if self._features.activation == "silu":
                inner = F.silu(gate) * up
            else:
                limit = self._features.swiglu_limit
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = gate * torch.sigmoid(self._features.swiglu_alpha * gate) * (up + 1)
            out = F.linear((inner * shares.float()[:, None]).to(part.dtype), second[0])
            if second[1] is not None:
                out = out + (second[1] * shares.float()[:, None]).to(out.dtype)
            outs.append(out)
        return torch.cat(outs), None

    def _linear(self, name: str, number: int) -> tuple[Tensor, Tensor | None]:
        linear: GroupedLinear = getattr(self, name)
        return linear.weight[number], None if linear.bias is None else linear.bias[number]
