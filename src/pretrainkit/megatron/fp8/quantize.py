"""Tensors in FP8 and how they are made: by Triton on a GPU, by plain torch with the same result elsewhere.

Every scale is dynamic, from the tensor that it belongs to: no history, and nothing to save in a checkpoint. It is the
smallest power of two for which the largest absolute value fits the format, so that scaling itself rounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

FORWARD = torch.float8_e4m3fn
"""Of activations and weights: 3 bits of mantissa, from 2^-9 to 448."""
GRADIENT = torch.float8_e4m3fn
"""Of gradients. e5m2 has a wider range and one bit of mantissa less; with a scale a row the range isn't needed."""
Pair = tuple[Tensor, Tensor]
"""FP8 values, and scales."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products: Ada's."""
COUNTED = 16
"""Of so many rows one is looked at for underflow."""


def on_fp8_unit(tensor: Tensor) -> bool:
    """Whether the tensor's device computes in FP8 (Ada, Hopper, Blackwell); elsewhere products are emulated in fp32."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= FIRST_CAPABILITY


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in FP8: its rows are values x scales."""

    values: Tensor  # [rows, columns] e4m3 or e5m2
    scales: Tensor  # [rows] fp32, or [1] for the entire matrix

    def exact(self) -> Tensor:
        """What it stands for, in fp32 [rows, columns]."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True)
class Scaling:
    """How operands are scaled: with one scale a row, or one a tensor.

    Arguments below: `stats` [2, rows] gets the rows' scales and, for every COUNTED-th row, how many of its values
    become zero though they weren't. `keep` asks for the result in its own dtype, too. Ranks of `group` have other rows
    of the same tensor.
    """

    by_tensor: bool = False

    def cast(
        self,
        values: Tensor,
        dtype: torch.dtype,
        stats: Tensor | None = None,
        *,
        group: ProcessGroup | None = None,
        into: Fp8Tensor | None = None,
    ) -> Fp8Tensor:
        """values [rows, columns] in FP8, in the memory of `into` if it is given."""
        on_gpu, memory = on_fp8_unit(values), _memory(into)
        if not self.by_tensor:
            return Fp8Tensor(*(_kernels().cast if on_gpu else _cast)(values, dtype, stats, memory))
        largest = _kernels().largest_bits(values) if on_gpu else _bits(values).max().reshape(1)
        if group is not None:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        cast_by = _kernels().cast_by_tensor if on_gpu else _cast_by
        return Fp8Tensor(*cast_by(values, largest, dtype, stats, memory))

    def normalize(
        self,
        hidden: Tensor,
        weight: Tensor,
        eps: float,
        *,
        keep: bool,
        stats: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> tuple[Fp8Tensor, Tensor | None, Tensor]:
        """The RMSNorm of hidden [rows, columns], and the reciprocals of the rows' root mean squares."""
        exact = torch.empty_like(hidden) if keep or self.by_tensor else None
        if on_fp8_unit(hidden):
            values, scales, reciprocals = _kernels().normalize(hidden, weight, eps, exact, stats)
        else:
            wide = hidden.float()
            reciprocals = torch.rsqrt(wide.square().mean(1) + eps)
            values, scales = _cast(_kept(wide * reciprocals[:, None] * weight.float(), exact), FORWARD, stats)
        normed = Fp8Tensor(values, scales)
        if self.by_tensor and exact is not None:
            normed = self.cast(exact, FORWARD, stats, group=group)
        return normed, exact if keep else None, reciprocals

    def swiglu(self, gate_up: Tensor, *, keep: bool, stats: Tensor | None = None) -> tuple[Fp8Tensor, Tensor | None]:
        """SwiGLU [rows, half] of gate and up [rows, 2 x half]."""
        exact = torch.empty_like(gate_up[:, : gate_up.shape[1] // 2]).contiguous() if keep or self.by_tensor else None
        if on_fp8_unit(gate_up):
            found = Fp8Tensor(*_kernels().swiglu(gate_up, exact, stats))
        else:
            gate, up = gate_up.float().chunk(2, dim=1)
            found = Fp8Tensor(*_cast(_kept(F.silu(gate) * up, exact), FORWARD, stats))
        if self.by_tensor and exact is not None:
            found = self.cast(exact, FORWARD, stats)
        return found, exact if keep else None

    def swiglu_gradient(
        self, gradient: Tensor, gate_up: Tensor, *, keep: bool, stats: Tensor | None = None
    ) -> tuple[Fp8Tensor, Tensor | None]:
        """The gradient of gate and up [rows, 2 x half] for that of their SwiGLU [rows, half]."""
        exact = torch.empty_like(gate_up) if keep or self.by_tensor else None
        if on_fp8_unit(gate_up):
            found = Fp8Tensor(*_kernels().swiglu_gradient(gradient, gate_up, GRADIENT, exact, stats))
        else:
            (gate, up), above = gate_up.float().chunk(2, dim=1), gradient.float()
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            both = torch.cat([above * up * (silu * (1 - sigmoid) + sigmoid), above * silu], dim=1)
            found = Fp8Tensor(*_cast(_kept(both, exact), GRADIENT, stats))
        if self.by_tensor and exact is not None:
            found = self.cast(exact, GRADIENT, stats)
        return found, exact if keep else None


def transpose(matrix: Fp8Tensor, into: Fp8Tensor | None = None) -> Fp8Tensor:
    """The matrix [rows, columns] as [columns, rows], with its largest scale for all of them.

    Powers of two divide exactly, so only values that become subnormal are rounded again: those below 2^-14 of the
    largest. Scales of their own for the columns made no gradient better, and take another pass. The result is written
    to the memory of `into` if that is given.
    """
    memory = _memory(into)
    if on_fp8_unit(matrix.values):
        return Fp8Tensor(*_kernels().transpose(matrix.values, matrix.scales, memory))
    values, scales = matrix.values.t().contiguous(), matrix.scales
    if scales.numel() > 1 or len(matrix.values) == 1:
        largest = (scales.view(torch.int32) & 0x7FFFFFFF).max().view(torch.float32)
        values = (values.float() * (scales / largest)).to(values.dtype)
        scales = largest.expand(len(values)).contiguous()
    return Fp8Tensor(*_written((values, scales), memory))


def norm_gradients(
    hidden: Tensor, weight: Tensor, reciprocals: Tensor, normed_gradient: Tensor, residual_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `hidden` [..., h] and a norm's `weight` [h], from those of the norm and of the skip connection."""
    if on_fp8_unit(hidden):
        from pretrainkit.megatron.triton import rms_norm

        return rms_norm.gradients(hidden, weight, reciprocals, normed_gradient, residual_gradient)
    unit = hidden.float() * reciprocals.view(*hidden.shape[:-1], 1)
    above = normed_gradient.float()
    of_weight = (above * unit).flatten(0, -2).sum(0)
    above = above * weight.float()
    of_hidden = (above - unit * (above * unit).mean(-1, keepdim=True)) * reciprocals.view(*hidden.shape[:-1], 1)
    return (of_hidden + residual_gradient.float()).to(hidden.dtype), of_weight.to(weight.dtype)


def _kernels():  # type: ignore[no-untyped-def]
    from pretrainkit.megatron.triton import fp8_cast

    return fp8_cast


def _bits(values: Tensor) -> Tensor:
    """Absolute values as integers of the same order, in which NaN is larger than infinity, which is the largest."""
    return values.float().view(torch.int32) & 0x7FFFFFFF


def _scales(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales for largest absolute values given as `_bits`, NaN for those that aren't finite; and their inverses."""
    log2_limit = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}[dtype]  # both formats' largest is 1.75 x 2^this
    exponents = (bits >> 23) - 127 - log2_limit + ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = exponents.clamp(-100, 100)
    scales = ((127 + exponents) << 23).view(torch.float32)
    return torch.where(bits < 0x7F800000, scales, torch.nan), ((127 - exponents) << 23).view(torch.float32)


def _cast(values: Tensor, dtype: torch.dtype, stats: Tensor | None = None, into: Pair | None = None) -> Pair:
    scales, inverses = _scales(_bits(values).amax(1), dtype)
    small = (values.float() * inverses[:, None]).to(dtype)
    _note(values, small, scales, stats)
    return _written((small, scales), into)


def _cast_by(
    values: Tensor, largest: Tensor, dtype: torch.dtype, stats: Tensor | None = None, into: Pair | None = None
) -> Pair:
    scale, inverse = _scales(largest, dtype)
    small = (values.float() * inverse).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    _note(values, small, scale.expand(len(values)), stats)
    return _written((small, scale), into)


def _memory(into: Fp8Tensor | None) -> Pair | None:
    return (into.values, into.scales) if into else None


def _written(made: Pair, into: Pair | None) -> Pair:
    if into is None:
        return made
    for kept, new in zip(into, made, strict=True):
        kept.copy_(new)
    return into


def _note(values: Tensor, small: Tensor, scales: Tensor, stats: Tensor | None) -> None:
    if stats is not None:
        stats[0] = scales
        stats[1, ::COUNTED] = ((values != 0) & (small.float() == 0)).sum(1)[::COUNTED].float()


def _kept(values: Tensor, exact: Tensor | None) -> Tensor:
    if exact is not None:
        exact.copy_(values)
    return values
