"""Megatron's linear layers with FP8 products: of the forward pass, of the input's gradient and the weight's gradient.

| tensor | FP8 made by | sent to TP ranks as |
|---|---|---|
| input of qkv and of fc1 | the norm | FP8, with sequence parallelism |
| input of proj | a cast | - |
| input of fc2 | SwiGLU | - |
| gradient of qkv's output | a cast | - |
| gradient of proj's and of fc2's output | a cast | FP8, with sequence parallelism |
| gradient of fc1's output | SwiGLU's gradient | - |
| weights | a cast, once a step | - |

A row is a token and is cast where it is made, so that gathering FP8 gives what a cast after the gather would. The
weight's gradient sums over tokens: both its operands are needed transposed, since Hopper's FP8 products read rows only.

The layers have the weights of `linear`'s, and with `in_bf16` compute as those do.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from pretrainkit.config.schema import Fp8
from pretrainkit.megatron.fp8.experts import Fp8GroupedExperts
from pretrainkit.megatron.fp8.module import Fp8Module, computes_in_bf16
from pretrainkit.megatron.fp8.products import Fp8Products
from pretrainkit.megatron.fp8.quantize import FORWARD, GRADIENT, Fp8Tensor, norm_gradients
from pretrainkit.megatron.fp8.stats import Stats
from pretrainkit.megatron.fp8.tensor_parallel import TensorParallel
from pretrainkit.megatron.linear import RMSNormColumnParallelLinear, add_fused_residual


def use_fp8(layer: ModuleSpec, fp8: Fp8) -> ModuleSpec:
    """The spec of a layer of `layer_spec`, changed so that its linear layers are in FP8, but for shared experts."""
    parts, params = layer.submodules, {"fp8": fp8}
    attention = parts.self_attention.submodules
    attention.linear_qkv = ModuleSpec(module=Fp8RMSNormColumnParallelLinear, params=params)
    attention.linear_proj = ModuleSpec(module=Fp8RowParallelLinear, params=params)
    if parts.mlp.module is MLP:
        linear = MLPSubmodules(linear_fc1=RMSNormColumnParallelLinear, linear_fc2=RowParallelLinear)
        parts.mlp = ModuleSpec(module=Fp8MLP, submodules=linear, params=params)
        parts.mlp_bda = add_fused_residual
    else:
        experts = parts.mlp.submodules.experts
        parts.mlp.submodules.experts = ModuleSpec(module=Fp8GroupedExperts, params=experts.params)
    parts.self_attn_bda = add_fused_residual
    return layer


class _NormLinear(torch.autograd.Function):
    """Norm and column-parallel product: hidden [s, b, h] to [s x tp, b, n / tp]; and `hidden`, the skip connection."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: Tensor, weight: Tensor, eps: float, p: Fp8Products) -> Any:
        rows = hidden.contiguous().flatten(0, 1)
        normed, exact, reciprocals = p.scaling.normalize(
            rows, norm, eps, keep=p.keeps_bf16, stats=p.stats.of("input", rows), group=p.parallel.gathers
        )
        output = p.forward(p.parallel.gather(normed)())
        ctx.p, ctx.weight = p, weight
        ctx.save_for_backward(hidden, norm, reciprocals, *p.keep(normed, exact, is_part=True))
        return output.unflatten(0, (-1, hidden.shape[1])), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, residual_gradient: Tensor) -> tuple[Any, ...]:
        p, weight = ctx.p, ctx.weight
        hidden, norm, reciprocals, *kept = ctx.saved_tensors
        gathered = p.gather(tuple(kept))
        gradient = gradient.contiguous().flatten(0, 1)
        small = p.scaling.cast(gradient, GRADIENT, p.stats.of("output gradient", gradient))
        reduced = p.parallel.reduce(p.input_gradient(small))
        of_weight = p.weight_gradient(weight, small, gradient, gathered())
        of_hidden, of_norm = norm_gradients(hidden, norm, reciprocals, reduced().view_as(hidden), residual_gradient)
        return of_hidden, of_norm, of_weight, None, None


class _RowLinear(torch.autograd.Function):
    """Row-parallel product: inputs [s, b, k / tp] to the sum over ranks [s, b, n], or this rank's part of its rows."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, p: Fp8Products) -> Tensor:
        rows = inputs.contiguous().flatten(0, 1)
        small = p.scaling.cast(rows, FORWARD, p.stats.of("input", rows))
        output = p.parallel.reduce(p.forward(small))()
        ctx.p, ctx.weight, ctx.shape = p, weight, inputs.shape
        ctx.save_for_backward(*p.keep(small, rows if p.keeps_bf16 else None))
        return output.unflatten(0, (-1, inputs.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        p = ctx.p
        small, exact = _gathered_gradient(p, gradient)
        return (
            p.input_gradient(small).view(ctx.shape),
            p.weight_gradient(ctx.weight, small, exact, ctx.saved_tensors),
            None,
        )


class _Mlp(torch.autograd.Function):
    """Norm, fc1, SwiGLU and fc2: hidden [s, b, h] to [s, b, h], and `hidden` as the skip connection."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        norm: Tensor,
        first: Tensor,
        second: Tensor,
        eps: float,
        p: Fp8Products,
        q: Fp8Products,
    ) -> Any:
        rows = hidden.contiguous().flatten(0, 1)
        normed, exact, reciprocals = p.scaling.normalize(
            rows, norm, eps, keep=p.keeps_bf16, stats=p.stats.of("input", rows), group=p.parallel.gathers
        )
        gate_up = p.forward(p.parallel.gather(normed)())
        half = gate_up[:, : gate_up.shape[1] // 2]
        inner, exact_inner = q.scaling.swiglu(gate_up, keep=q.keeps_bf16, stats=q.stats.of("input", half))
        output = q.parallel.reduce(q.forward(inner))()
        ctx.p, ctx.q, ctx.weights = p, q, (first, second)
        kept = p.keep(normed, exact, is_part=True)
        ctx.split = len(kept)
        ctx.save_for_backward(hidden, norm, reciprocals, gate_up, *kept, *q.keep(inner, exact_inner))
        return output.view_as(hidden), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, residual_gradient: Tensor) -> tuple[Any, ...]:
        p, q, (first, second) = ctx.p, ctx.q, ctx.weights
        hidden, norm, reciprocals, gate_up, *kept = ctx.saved_tensors
        gathered = p.gather(tuple(kept[: ctx.split]))
        small, exact = _gathered_gradient(q, gradient)
        inner = q.input_gradient(small)
        of_gate_up, exact_gate_up = p.scaling.swiglu_gradient(
            inner, gate_up, keep=p.keeps_bf16, stats=p.stats.of("output gradient", gate_up)
        )
        reduced = p.parallel.reduce(p.input_gradient(of_gate_up))
        of_second = q.weight_gradient(second, small, exact, tuple(kept[ctx.split :]))
        of_first = p.weight_gradient(first, of_gate_up, exact_gate_up, gathered())
        of_hidden, of_norm = norm_gradients(hidden, norm, reciprocals, reduced().view_as(hidden), residual_gradient)
        return of_hidden, of_norm, of_first, of_second, None, None, None


def _gathered_gradient(p: Fp8Products, gradient: Tensor) -> tuple[Fp8Tensor, Tensor | None]:
    """The gradient of a row-parallel output, of all ranks' rows, in FP8 and, if it is needed, in bf16."""
    rows = gradient.contiguous().flatten(0, 1)
    small = p.scaling.cast(rows, GRADIENT, p.stats.of("output gradient", rows), group=p.parallel.gathers)
    exact = p.parallel.gather_rows(rows)() if p.keeps_bf16 else None
    return p.parallel.gather(small)(), exact


def _with_bias(output: Tensor, linear: Any) -> tuple[Tensor, Tensor | None]:
    """What Megatron's linear layers give: the output, and a bias that their caller adds."""
    if linear.bias is None:
        return output, None
    return (output, linear.bias) if linear.skip_bias_add else (output + linear.bias, None)


class Fp8RMSNormColumnParallelLinear(RMSNormColumnParallelLinear, Fp8Module):
    """RMSNorm, then a column-parallel linear layer in FP8."""

    def __init__(self, *args: Any, fp8: Fp8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.products = Fp8Products(fp8, TensorParallel(self.tp_group, self.sequence_parallel))

    def update_copies(self) -> None:
        self.products.update(self.weight)

    def stats(self) -> dict[str, Stats]:
        return {"qkv": self.products.stats}

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if computes_in_bf16():
            return super().forward(hidden, *args, **kwargs)
        self.update_copies()
        eps = self.config.layernorm_epsilon
        output, residual = _NormLinear.apply(hidden, self.layer_norm_weight, self.weight, eps, self.products)
        if torch.is_grad_enabled():  # see FusedResidualRMSNormColumnParallelLinear
            hidden.residual = residual
        return _with_bias(output, self)


class Fp8RowParallelLinear(RowParallelLinear, Fp8Module):
    """A row-parallel linear layer in FP8."""

    def __init__(self, *args: Any, fp8: Fp8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.products = Fp8Products(fp8, TensorParallel(self.tp_group, self.sequence_parallel))

    def update_copies(self) -> None:
        self.products.update(self.weight)

    def stats(self) -> dict[str, Stats]:
        return {"proj": self.products.stats}

    def forward(self, input_: Tensor) -> Any:
        if computes_in_bf16():
            return super().forward(input_)
        self.update_copies()
        output = _RowLinear.apply(input_, self.weight, self.products)
        return _with_bias(output, self)


class Fp8MLP(MLP, Fp8Module):
    """Norm, fc1, SwiGLU and fc2 in FP8. The linear layers only hold the weights."""

    def __init__(self, *args: Any, fp8: Fp8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first, second = self.linear_fc1, self.linear_fc2
        assert first.bias is None and second.bias is None, "FP8 MLPs have no biases"
        self.first, self.second = (
            Fp8Products(fp8, TensorParallel(linear.tp_group, linear.sequence_parallel)) for linear in (first, second)
        )

    def update_copies(self) -> None:
        self.first.update(self.linear_fc1.weight)
        self.second.update(self.linear_fc2.weight)

    def stats(self) -> dict[str, Stats]:
        return {"fc1": self.first.stats, "fc2": self.second.stats}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if computes_in_bf16():
            return super().forward(hidden_states, *args, **kwargs)
        self._await_weights()
        self.update_copies()
        norm, eps = self.linear_fc1.layer_norm_weight, self.config.layernorm_epsilon
        weights = self.linear_fc1.weight, self.linear_fc2.weight
        output, residual = _Mlp.apply(hidden_states, norm, *weights, eps, self.first, self.second)
        if torch.is_grad_enabled():
            hidden_states.residual = residual
        return output, None

    def _await_weights(self) -> None:
        """Run the linear layers' forward pre-hooks: with overlapped parameter gathering they wait for the weights."""
        for linear in (self.linear_fc1, self.linear_fc2):
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
