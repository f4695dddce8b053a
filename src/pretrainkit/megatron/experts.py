"""A rank's experts of a layer in grouped GEMMs, without Transformer Engine.

Megatron's router and dispatcher send a rank the tokens of its experts, sorted by expert. All of them are multiplied in
three GEMMs, forward and backward, whose groups are the experts (torch's `grouped_mm`). Megatron's SequentialMLP, its
choice without Transformer Engine, has three for each expert.

A layer's experts are one parameter [experts, out, in] per GEMM. In checkpoints they are what Transformer Engine's
TEGroupedMLP and SequentialMLP make of theirs: a tensor for each expert, with gate and up apart, so that each loads the
others' at any expert and tensor parallel size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.megatron.router_logits import PARTS, bf16_parts
from pretrainkit.megatron.wgrad import WgradGemm


class GroupedLinear(torch.nn.Module):
    """One matrix for each of a rank's experts: rows [t, in], sorted by expert, to [t, out]; and biases."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        config: TransformerConfig,
        *,
        split_dim: int,
        init: Any,
        has_bias: bool,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        """`shape`: experts, out, in of this rank; expert tensor parallelism splits the matrices along `split_dim`."""
        super().__init__()
        self.split_dim, self._tp_group = split_dim, tp_group
        self.weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1 + split_dim, stride=1)
        # Megatron gives such parameters an optimizer of their own, with the ranks that have the same experts. They are
        # such at any EP: a checkpoint of two optimizers can't be loaded by one.
        self.weight.allreduce = False
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()), torch.no_grad():
                for expert in self.weight:
                    init(expert)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight[:, :, 0])) if has_bias else None
        if self.bias is not None:
            self.bias.allreduce = False
            # Counted in the norm of gradients where it is split, else on the first of the ranks that share it.
            is_counted = split_dim == 0 or tp_group.rank() == 0
            set_tensor_model_parallel_attributes(self.bias, is_parallel=is_counted, dim=1, stride=1)

    def biases(self, shares: Tensor, ends: Tensor) -> Tensor:
        """The bias of each row [t, out] times its share [t] fp32; a rank's part where ETP ranks add up their outputs.

        A GEMM too, of three columns whose sum is the share: the gradient is summed by expert without atomics.
        """
        assert self.bias is not None
        bias, ranks = self.bias, 1 if self.split_dim == 0 else self._tp_group.size()
        if ranks > 1:  # its gradient is that of the whole: every rank has the same
            bias = bias + (bias / ranks - bias).detach()
        columns = _SplitShares.apply(shares, bias.dtype)
        return _GroupedMatmul.apply(columns, bias.unsqueeze(2).expand(-1, -1, _BIAS_COLUMNS).contiguous(), ends)

    def forward(self, rows: Tensor, ends: Tensor, on_host: EndsOnHost | None = None) -> Tensor:
        """`ends` [experts] int32: where each expert's rows end."""
        return _GroupedMatmul.apply(rows, self.weight, ends, on_host)


MAX_GEMMS = 32
"""Experts of a rank up to which each has a cuBLAS GEMM of its own for its weight's gradient; with more, all have one in
Triton. TFLOP/s of both on an H200, the sum into the buffer included: 555 and 464 with 8 experts of Mixtral, 380 and 351
with 32 of gpt-oss, 91 to 176 and 243 to 253 with 128 of Qwen3-30B-A3B; torch's grouped GEMM and a sum have 394, 302 and
186 to 190."""
_BIAS_COLUMNS = 8
"""Of the GEMM that adds biases: grouped GEMMs have rows of a multiple of 16 bytes."""


class _SplitShares(torch.autograd.Function):
    """Numbers [t] in fp32 as columns [t, _BIAS_COLUMNS] whose sum they are."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, dtype: torch.dtype) -> Tensor:
        columns = shares.new_zeros((len(shares), _BIAS_COLUMNS), dtype=dtype)
        if dtype == torch.bfloat16:
            columns[:, :PARTS] = bf16_parts(shares).t()
        else:
            columns[:, 0] = shares
        return columns

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[:, 0].float(), None


class EndsOnHost:
    """Where each expert's rows end, copied to the host while the forward pass goes on, for the backward pass."""

    def __init__(self, ends: Tensor) -> None:
        self._ends = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True).copy_(ends, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event()

    def slices(self) -> list[slice]:
        """The rows of each expert."""
        self._copied.synchronize()
        ends = self._ends.tolist()
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


class _GroupedMatmul(torch.autograd.Function):
    """rows [t, k] times the transpose of their expert's matrix [e, n, k]; groups end at `ends` [e]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Any, ends: Tensor, on_host: EndsOnHost | None = None) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weight, ctx.on_host = weight, on_host
        return _grouped(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = _grouped(gradient, ctx.weight, ends)
        return of_rows, weight_gradient(ctx.weight, gradient, rows, ends, ctx.on_host), None, None


def weight_gradient(
    weight: Any, gradient: Tensor, rows: Tensor, ends: Tensor, on_host: EndsOnHost | None = None
) -> Tensor:
    """The gradient of `weight` [e, n, k], for that of the output [t, n] of rows [t, k], whose groups end at `ends` [e].

    It is added to Megatron's gradient buffer, if there is one.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return _grouped(gradient.t(), rows, ends)
    if not len(rows):
        pass  # with many ranks all tokens of a microbatch may be others'
    elif not rows.is_cuda or rows.dtype != torch.bfloat16 or main_grad.dtype != torch.float32:
        main_grad.add_(_grouped(gradient.t(), rows, ends))
    elif on_host:
        for part, of_expert in zip(on_host.slices(), main_grad, strict=True):
            if part.start < part.stop:
                WgradGemm.wgrad_gemm_accum_fp32(rows[part], gradient[part], of_expert)
    else:
        from pretrainkit.megatron.triton.grouped_wgrad import add_weight_gradients

        add_weight_gradients(gradient, rows, ends, main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped GEMM, of no rows, too: of rows [t, k] and [e, k, n], or of the two sides [n, t] and [t, k]."""
    rows = right if right.dim() == 2 else left
    if len(rows):
        return F.grouped_mm(left, right, offs=ends)
    return left.new_zeros((len(ends), len(left), right.size(1)) if rows is right else (0, right.size(2)))


class GroupedExperts(MegatronModule):
    """The experts of a layer on one rank: SwiGLU MLPs whose outputs are multiplied by the router's probabilities."""

    linear = GroupedLinear

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        features: LayerFeatures = LLAMA,
    ) -> None:
        super().__init__(config=config)
        assert config.gated_linear_unit and config.activation_func is F.silu and not config.add_bias_linear
        self.num_local_experts, self._features = num_local_experts, features
        self._ep_group, self._tp_group, self._dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size // self._tp_group.size()
        more: dict[str, Any] = {"config": config, "has_bias": features.mlp_bias, "tp_group": self._tp_group}
        self.linear_fc1 = self.linear(
            (num_local_experts, 2 * ffn, hidden), split_dim=0, init=config.init_method, **more
        )
        self.linear_fc2 = self.linear(
            (num_local_experts, hidden, ffn), split_dim=1, init=config.output_layer_init_method, **more
        )

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """rows [t, h] sorted by expert, how many each has, and the router's probability of each: to [t, h]."""
        ends = tokens_per_expert.to(device=rows.device).cumsum(0).to(torch.int32)
        is_counted = rows.is_cuda and torch.is_grad_enabled() and self.num_local_experts <= MAX_GEMMS
        on_host = EndsOnHost(ends) if is_counted else None
        shares = probabilities.float()
        if self._features.routing and self._features.routing.scales_input:
            rows, shares = (rows * shares[:, None]).to(rows.dtype), torch.ones_like(shares)
        gate_up = self.linear_fc1(rows, ends, on_host)
        if self._features.mlp_bias:
            gate_up = gate_up + self.linear_fc1.biases(torch.ones_like(shares), ends)
        out = self.linear_fc2(self._activated(gate_up, shares), ends, on_host)
        if self._features.mlp_bias:
            out = out + self.linear_fc2.biases(shares, ends)
        return out, None

    def _activated(self, gate_up: Tensor, shares: Tensor) -> Tensor:
        """SwiGLU of gate_up [t, 2 f] times the shares [t], in fp32 inside, as Megatron's fused function has it."""
        limit, alpha = self._features.swiglu_limit, self._features.swiglu_alpha
        is_clamped = self._features.activation != "silu"
        if gate_up.is_cuda:
            from pretrainkit.megatron.triton.expert_swiglu import expert_swiglu

            return expert_swiglu(gate_up, shares, *((limit, alpha) if is_clamped else ()))
        gate, up = gate_up.float().chunk(2, dim=-1)
        if is_clamped:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
        else:
            inner = F.silu(gate) * up
        return (inner * shares[:, None]).to(gate_up.dtype)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the names of TEGroupedMLP and SequentialMLP too; extra states are without content."""
        for name in [name for name in state if name.startswith(prefix) and "_extra_state" in name]:
            del state[name]
        for name in (f"{linear}.{kind}" for linear in ("linear_fc1", "linear_fc2") for kind in ("weight", "bias")):
            for one in (f"{name}{{}}", f"local_experts.{{}}.{name}"):
                if prefix + one.format(0) in state:
                    found = [state.pop(prefix + one.format(number)) for number in range(self.num_local_experts)]
                    state[prefix + name] = torch.stack(found)
        super()._load_from_state_dict(state, prefix, *args)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Tensors by expert, as those of SequentialMLP and TEGroupedMLP."""
        state: dict[str, Any] = {}
        for name in ("linear_fc1", "linear_fc2"):
            linear: GroupedLinear = getattr(self, name)
            replica = (0, 0, self._dp_group.rank())
            for kind, tensor in linear.named_parameters():
                is_whole = kind == "bias" and linear.split_dim == 1
                build = partial(self._split, None if is_whole else linear.split_dim, sharded_offsets)
                key, copy = f"{prefix}experts.{name}.{kind}", (0, self._tp_group.rank() if is_whole else 0, replica[2])
                state[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(key, tensor, build, _joined, copy)
            for number, offsets in self._expert_offsets(sharded_offsets):
                # Transformer Engine's layers have these, without content, and don't load a checkpoint without them.
                state[f"{prefix}{name}._extra_state{number}"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{name}._extra_state", offsets, (0, self._tp_group.rank(), replica[2])
                )
        return state

    def _expert_offsets(self, sharded_offsets: tuple[Any, ...]) -> list[tuple[int, tuple[Any, ...]]]:
        """Of each expert of this rank: its number, and where its tensors are among those of all layers and experts."""
        first, count = self._ep_group.rank() * self.num_local_experts, self._ep_group.size() * self.num_local_experts
        axis = len(sharded_offsets)
        numbers = range(first, first + self.num_local_experts)
        return [(number, (*sharded_offsets, (axis, number, count))) for number in numbers]

    @torch.no_grad()
    def _split(
        self, split_dim: int | None, sharded_offsets: tuple[Any, ...], key: str, weight: Tensor, replica: Any, _: Any
    ) -> list[list[ShardedTensor]]:
        """Of each expert's matrix or bias its tensors in a checkpoint: two where gate and up are one.

        `split_dim` None: every expert-tensor-parallel rank has the whole.
        """
        rank, size = self._tp_group.rank(), self._tp_group.size()
        parts = 2 if split_dim == 0 else 1  # gate and up
        return [
            [
                ShardedTensor.from_rank_offsets(
                    key,
                    tensor,
                    *offsets,
                    *([] if split_dim is None else [(len(offsets) + split_dim, part * size + rank, parts * size)]),
                    replica_id=replica,
                    prepend_axis_num=len(offsets),
                )
                for part, tensor in enumerate(matrix.chunk(parts))
            ]
            for (_, offsets), matrix in zip(self._expert_offsets(sharded_offsets), weight, strict=True)
        ]


@torch.no_grad()
def _joined(experts: list[list[Tensor]]) -> Tensor:
    """The parameter, of what `_split` made of it."""
    return torch.stack([torch.cat(parts) for parts in experts])
