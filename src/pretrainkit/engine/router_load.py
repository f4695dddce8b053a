"""How a model's routers share out tokens among experts: counted in the forward pass, read when the norm is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger

STARVED_SHARE = 0.05
"""Of an even share of a layer's tokens: an expert with less is said to starve."""
WINDOW_STEPS = 100
"""Steps over which that is looked at, and for which the load of every expert is recorded."""

RECORDED = {"load_balancing_loss": "aux_loss", "seq_load_balancing_loss": "aux_loss", "z_loss": "z_loss"}
"""Megatron's names of a router's losses, and those in records."""

log = get_logger(__name__)


class RouterLoad:
    """Tokens of each expert of each layer, since they were last taken, and the routers' auxiliary loss."""

    def __init__(self, run: ResolvedRun) -> None:
        self._microbatches = run.num_microbatches
        routing = run.model.features.routing
        by_sequence = routing is not None and routing.aux_loss_by_sequence
        coefficients = {
            "seq_load_balancing_loss" if by_sequence else "load_balancing_loss": run.router_aux_loss_coef,
            "z_loss": run.config.training.router_z_loss_coef,
        }
        self._losses: dict[str, list[float]] = {name: [] for name, value in coefficients.items() if value}
        """By Megatron's name, of each step since the last record."""
        self._layers = list(run.model.expert_layers)
        self._has_biases = routing is not None and routing.expert_bias
        self._routers: list[TopKRouter] = []
        self._bias_range = 0.0
        size = run.model.num_layers, run.model.num_experts
        self._step: Tensor | None = None
        """[layers, experts]: tokens of the current step on this rank."""
        self._taken, self._window = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        """The same of all ranks, for the steps since the last record, and since the window began."""

    def count(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Count the tokens that the routers of these modules send."""
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in self._routers:
            router.register_forward_hook(self._count)

    def _count(self, router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        # A recomputed layer runs twice, the first time without gradients; so do evaluations.
        if not router.training or not torch.is_grad_enabled():
            return
        tokens = output[1].sum(0)
        if self._step is None:
            self._step = torch.zeros(self._taken.shape, dtype=torch.int64, device=tokens.device)
        self._step[router.layer_number - 1] += tokens

    def finish_step(self, device: torch.device) -> None:
        """Add up the step's counts of all ranks, on all ranks. To be called where the device is waited for anyway."""
        step = torch.zeros(self._taken.shape, dtype=torch.int64, device=device) if self._step is None else self._step
        torch.distributed.all_reduce(step)
        self._taken += step.cpu()
        self._window += step.cpu()
        step.zero_()
        if self._has_biases:
            ranges = [router.expert_bias.max() - router.expert_bias.min() for router in self._routers]
            largest = torch.stack([torch.zeros((), device=device), *ranges]).max()
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            self._bias_range = largest.item()
        if self._losses:
            moe_utils.reduce_aux_losses_tracker_across_ranks()
            tracker = moe_utils.get_moe_layer_wise_logging_tracker()
            for name, of_steps in self._losses.items():
                values = tracker[name]["values"][self._layers]
                of_steps.append(_of_all_ranks(name, values) / self._microbatches)
            moe_utils.clear_aux_losses_tracker()

    def take(self) -> dict[str, float]:
        """Of the steps since the last call; a load is a multiple of an even share of the layer's tokens.

        `balance` is the entropy of a layer's loads over that of even ones, of the layer where it is lowest.
        `bias_range` is the difference of the largest and the smallest bias of a layer's experts, where it is largest.
        """
        loads, losses = loads_of(self._taken[self._layers]), self._losses
        self._taken.zero_()
        self._losses = {name: [] for name in losses}
        found = {
            "largest_load": loads.max().item(),
            "smallest_load": loads.min().item(),
            "balance": balances_of(loads).min().item(),
        }
        if self._has_biases:
            found["bias_range"] = self._bias_range
        return found | {RECORDED[name]: sum(values) / len(values) for name, values in losses.items() if values}

    def take_window(self) -> list[list[float]]:
        """The load of each expert, by layer that has some, since the last call; with a warning of those that starve."""
        loads = loads_of(self._window[self._layers])
        self._window.zero_()
        if starved := [f"layer {self._layers[row]}: {experts}" for row, experts in starving(loads).items()]:
            more = f" and {len(starved) - 3} layers more" if len(starved) > 3 else ""
            log.warning(
                f"experts that got less than {STARVED_SHARE:.0%} of an even share of the tokens since the last such "
                f"look: {'; '.join(starved[:3])}{more}"
            )
        return [[round(load, 3) for load in layer] for layer in loads.tolist()]


def _of_all_ranks(name: str, values: Tensor) -> float:
    """The mean over layers; Megatron has added up pipeline stages, and of all but the z loss the other ranks."""
    mean = values.mean()
    if name == "z_loss":
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(mean, group=group)
        mean /= group.size()
    return mean.item()


def loads_of(tokens: Tensor) -> Tensor:
    """tokens [layers, experts] as multiples of an even share of their layer's."""
    return tokens.double() / tokens.double().mean(1, keepdim=True).clamp(min=1e-9)


def balances_of(loads: Tensor) -> Tensor:
    """The entropy of each layer's loads [layers, experts] over that of even ones: 1 is even, 0 is one expert alone."""
    shares = loads / loads.size(1)
    return -torch.xlogy(shares, shares).sum(1) / math.log(loads.size(1))


def starving(loads: Tensor) -> dict[int, list[int]]:
    """Numbers of the experts that starve, by the row of their layer."""
    found: dict[int, list[int]] = {}
    for row, expert in (loads < STARVED_SHARE).nonzero().tolist():
        found.setdefault(row, []).append(expert)
    return found
