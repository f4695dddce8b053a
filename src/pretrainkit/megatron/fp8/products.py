"""The three products of a linear layer in FP8, and what they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pretrainkit.config.schema import Fp8
from pretrainkit.megatron.fp8.gemm import add_matmul, add_matmul_bf16, matmul
from pretrainkit.megatron.fp8.quantize import Fp8Tensor, Scaling, transpose
from pretrainkit.megatron.fp8.stats import Stats
from pretrainkit.megatron.fp8.tensor_parallel import TensorParallel
from pretrainkit.megatron.fp8.weights import Fp8Weight


class Fp8Products:
    """One weight's products and their settings."""

    def __init__(self, fp8: Fp8, parallel: TensorParallel) -> None:
        self.scaling = Scaling(by_tensor=fp8.recipe == "tensorwise")
        self.keeps_bf16 = fp8.recipe == "rowwise_wgrad_bf16"
        """Whether the weight's gradient is computed in bf16."""
        self.parallel = parallel
        self.stats = Stats()
        self._has_backward = True
        self.copies = Fp8Weight(self.scaling)

    def update(self, weight: Tensor) -> None:
        """Before the forward pass: make the weight's FP8 copies where they aren't of this step."""
        self._has_backward = torch.is_grad_enabled()
        self.copies.update(weight)

    def forward(self, inputs: Fp8Tensor) -> Tensor:
        """inputs [t, k] times the transpose of the weight [n, k], in bf16 [t, n]."""
        return matmul(inputs, self.copies.rows)

    def input_gradient(self, gradient: Fp8Tensor) -> Tensor:
        """The gradient of the inputs [t, k] in bf16, for that of the outputs [t, n]."""
        return matmul(gradient, self.copies.columns)

    def keep(self, inputs: Fp8Tensor, exact: Tensor | None, *, is_part: bool = False) -> tuple[Tensor, ...]:
        """What the backward pass needs of the inputs [t, k]; `is_part`: other ranks have the rest of their rows."""
        if not self._has_backward:
            return ()
        if exact is not None:
            return (exact,)
        kept = inputs if is_part and self.parallel.gathers else transpose(inputs)
        return kept.values, kept.scales

    def gather(self, kept: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Start to get what `keep` would have given for all ranks' rows, from what it gave for a part of them."""
        if not self.parallel.gathers:
            return lambda: kept
        if self.keeps_bf16:
            rows = self.parallel.gather_rows(kept[0])
            return lambda: (rows(),)
        whole = self.parallel.gather(Fp8Tensor(*kept))
        return lambda: self.keep(whole(), None)

    def weight_gradient(
        self, weight: Any, gradient: Fp8Tensor, exact_gradient: Tensor | None, kept: tuple[Tensor, ...]
    ) -> Tensor:
        """The gradient of `weight` [n, k]; it is added to Megatron's gradient buffer, if there is one."""
        into = getattr(weight, "main_grad", None)
        out = torch.zeros(weight.shape, device=weight.device) if into is None else into
        if self.keeps_bf16:
            assert exact_gradient is not None
            add_matmul_bf16(out, exact_gradient, kept[0])
        else:
            add_matmul(out, transpose(gradient), Fp8Tensor(*kept))
        if into is None:
            return out.to(weight.dtype)
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight)
