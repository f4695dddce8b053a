"""AdamW and gradient clipping without Transformer Engine and apex, and the gathering of the optimizer's state.

Megatron's distributed optimizer can only save and reshard the state layout of those packages: the step count is in the
parameter group, and each parameter's state is `exp_avg` and `exp_avg_sq`. torch.optim.AdamW has a step tensor per
parameter, which Megatron's checkpoint code refuses.

Megatron's `fully_reshardable` checkpoints need each parameter's full state. Megatron copies the state five times on the
CPU, into newly allocated memory, while training waits: 36 s were measured for half a billion parameters. In `gather` a
rank that has all of it (DP=1) passes its GPU tensors to the writer, which copies weights in the same way; otherwise
buckets are gathered between GPUs and copied to the host once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim.adamw import adamw

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Of a parameter's state in a checkpoint."""


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
            grads = [param.grad for param in params]
            moments = ([self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq"))
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            settings["beta1"], settings["beta2"] = group["betas"]
            adamw(params, grads, *moments, [], steps, fused=True, amsgrad=False, maximize=False, **settings)


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


class Slices:
    """Replaces a flat tensor of which only the slices that were added are read."""

    def __init__(self) -> None:
        self._by_range: dict[tuple[int, int], Tensor] = {}

    def add(self, start: int, values: Tensor) -> None:
        """Add the slice `values` [n] that begins at `start`."""
        self._by_range[start, start + values.numel()] = values

    def __getitem__(self, wanted: slice) -> Tensor:
        return self._by_range[wanted.start, wanted.stop]


def gather(optimizer: Any) -> dict[Any, Any]:
    """What DistributedOptimizer.get_parameter_state_dp_zero returns on all ranks, by buffer, dtype and key."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges_by_type in enumerate(optimizer.gbuf_ranges):
        state[index] = {}
        for dtype, bucket_ranges in ranges_by_type.items():
            buffer = optimizer.buffers[index]
            collect = _local if optimizer.data_parallel_group.size() == 1 else _gathered
            full: dict[str, Any] = {key: collect(optimizer, buffer, bucket_ranges, key) for key in STATE_KEYS}
            state[index][dtype] = full | {"numel_unpadded": buffer.numel_unpadded}
    return state


def _local(optimizer: Any, buffer: Any, bucket_ranges: list[dict[str, Any]], key: str) -> Slices:
    slices = Slices()
    for ranges in bucket_ranges:
        for parameter in ranges["param_map"]:
            values = optimizer._get_main_param_and_optimizer_states(parameter)[key]
            slices.add(buffer.param_index_map[parameter][0], values.detach().flatten())
    return slices


def _gathered(optimizer: Any, buffer: Any, bucket_ranges: list[dict[str, Any]], key: str) -> Tensor:
    """The buffer's state on the CPU, without the padding between buckets."""
    group = optimizer.data_parallel_group
    full = torch.empty(buffer.numel_unpadded, dtype=torch.float32, device="cpu")
    offset = 0
    for bucket, ranges in zip(buffer.buckets, bucket_ranges, strict=True):
        device = bucket.grad_data.device
        shard = torch.zeros(bucket.grad_data.numel() // group.size(), dtype=torch.float32, device=device)
        for parameter, of_parameter in ranges["param_map"].items():
            local = of_parameter["gbuf_local"]
            values = optimizer._get_main_param_and_optimizer_states(parameter)[key]
            shard[local.start : local.end].copy_(values.detach().flatten())
        bucket_state = torch.empty(bucket.grad_data.numel(), dtype=torch.float32, device=device)
        torch.distributed.all_gather_into_tensor(bucket_state, shard, group=group)
        full[offset : offset + bucket.numel_unpadded].copy_(bucket_state[: bucket.numel_unpadded])
        offset += bucket.numel_unpadded
    return full


def gathering_on_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedOptimizer.get_parameter_state_dp_zero` that uses `gather` to save; loading is unchanged."""

    def get_parameter_state_dp_zero(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if use_gloo_comm or empty_data or not return_on_all_ranks:
            return original(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return gather(self)

    return get_parameter_state_dp_zero


def without_conditions(original: Callable[..., Any]) -> Callable[..., Any]:
    """`get_megatron_optimizer` for NeMo, which passes arguments of Megatron-core before 0.16 at their defaults."""

    def get_megatron_optimizer(
        *arguments: Any,
        no_weight_decay_cond: None = None,
        scale_lr_cond: None = None,
        lr_mult: float = 1.0,
        **others: Any,
    ) -> Any:
        assert no_weight_decay_cond is None and scale_lr_cond is None and lr_mult == 1.0, "conditions are not supported"
        return original(*arguments, **others)

    return get_megatron_optimizer
