"""AdamW and gradient clipping for machines without Transformer Engine and apex.

Megatron's distributed optimizer can only save and reshard the state layout of those packages: the step count is in the
parameter group, and each parameter's state is `exp_avg` and `exp_avg_sq`. torch.optim.AdamW has a step tensor per
parameter, which Megatron's checkpoint code refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) by torch's fused kernel, one call per parameter group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # Transformer Engine's FusedAdam reads this from the groups of a checkpoint that it continues.
        super().__init__(params, defaults | {"bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
            # The kernel increments the step, so it gets the previous one.
            steps = list(torch.full((len(params),), float(step - 1), device=params[0].device))
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def multi_tensor_l2_norm(
    chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm [1] of all tensors as one vector. Megatron's fallback synchronizes with the GPU for each tensor."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None


def multi_tensor_scale(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """lists[1] = lists[0] x factor, in one launch if both are the same tensors, as in clipping."""
    source, target = lists
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)
