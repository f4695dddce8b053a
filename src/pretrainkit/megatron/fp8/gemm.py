"""Products of FP8 matrices: by cuBLASLt on a GPU, in fp32 elsewhere, which differs by the order of sums alone."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.megatron.fp8.quantize import FIRST_CAPABILITY, Fp8Tensor, on_fp8_unit
from pretrainkit.megatron.wgrad import WgradGemm

FAST_FORWARD, FAST_BACKWARD = True, True
"""Whether tensor cores sum with fewer bits (`use_fast_accum`)."""
GROUPED_CAPABILITY = (9, 0)
"""Compute capability of the GPUs with grouped FP8 products in torch: Hopper's."""

log = get_logger(__name__)


def check_device(*, emulates: bool, has_experts: bool) -> None:
    """Raise RequestError where this rank's GPU has no FP8 products, unless they are emulated.

    A warning says where experts stay in bf16, since the GPU has no grouped ones.
    """
    capability = torch.cuda.get_device_capability()
    if has_experts and capability >= FIRST_CAPABILITY and capability != GROUPED_CAPABILITY:
        log.warning(
            "experts stay in bf16: grouped FP8 products need Hopper (compute capability 9.0), %s has %d.%d",
            torch.cuda.get_device_name(),
            *capability,
        )
    if capability >= FIRST_CAPABILITY or emulates:
        return
    raise RequestError(
        f"{torch.cuda.get_device_name()} has no FP8 products (compute capability {capability[0]}.{capability[1]})",
        needed="compute capability 8.9 or later (Ada, Hopper, Blackwell)",
        action="train with --precision bf16; a run can change between bf16 and fp8 whenever it continues",
        where="--precision fp8",
    )


def matmul(left: Fp8Tensor, right: Fp8Tensor, *, fast: bool = FAST_FORWARD) -> Tensor:
    """left [n, k] times the transpose of right [m, k], in bf16 [n, m]."""
    if not on_fp8_unit(left.values):
        return (left.exact() @ right.exact().t()).to(torch.bfloat16)
    scales = left.scales[:, None], right.scales[None, :]
    if left.scales.numel() == 1 or right.scales.numel() == 1:
        scales = left.scales, right.scales
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def has_grouped_products(tensor: Tensor) -> bool:
    """Whether `grouped_matmul` is in FP8 on the tensor's device: on Hopper, and where it is emulated."""
    return not on_fp8_unit(tensor) or torch.cuda.get_device_capability(tensor.device) == GROUPED_CAPABILITY


def grouped_matmul(rows: Fp8Tensor, matrices: Fp8Tensor, ends: Tensor, *, fast: bool) -> Tensor:
    """rows [t, k], at least one, times the transpose of their group's matrix, of `matrices` [e n, k]; in bf16 [t, n].

    Scales are by row. Groups end at `ends` [e] int32, have any size, and may be empty; k and n are multiples of 16.
    """
    groups, inner = len(ends), rows.values.shape[1]
    if not on_fp8_unit(rows.values):
        wide = matrices.exact().view(groups, -1, inner)
        return F.grouped_mm(rows.exact(), wide.mT, offs=ends).to(torch.bfloat16)
    return torch._scaled_grouped_mm(
        rows.values,
        matrices.values.view(groups, -1, inner).mT,
        rows.scales,
        matrices.scales.view(groups, -1),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def add_matmul(out: Tensor, left: Fp8Tensor, right: Fp8Tensor) -> None:
    """out [n, m] fp32 += left [n, k] times the transpose of right [m, k]."""
    if not on_fp8_unit(out):
        out.addmm_(left.exact(), right.exact().t())
    elif can_add():
        from pretrainkit.megatron.fp8 import cublaslt

        cublaslt.add(out, left.values, left.scales, right.values, right.scales, fast=FAST_BACKWARD)
    else:
        out.add_(matmul(left, right, fast=FAST_BACKWARD))


def add_matmul_bf16(out: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """out [n, k] fp32 += the transpose of gradient [t, n] times inputs [t, k], both bf16."""
    if out.is_cuda:
        WgradGemm.wgrad_gemm_accum_fp32(inputs, gradient, out)
    else:
        out.addmm_(gradient.t().float(), inputs.float())


@functools.cache
def can_add() -> bool:
    """Whether this GPU's cuBLASLt adds such products to an fp32 matrix, by a trial; with a warning where it doesn't."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    left, right = (torch.randn((256, 512), device="cuda", generator=generator).to(torch.float8_e4m3fn) for _ in "ab")
    scales = torch.logspace(-4, 4, 256, base=2, device="cuda").exp2().clamp(max=4.0)
    out = torch.ones((256, 256), device="cuda")
    exact = out + Fp8Tensor(left, scales).exact() @ Fp8Tensor(right, scales).exact().t()
    try:
        from pretrainkit.megatron.fp8 import cublaslt

        cublaslt.add(out, left, scales, right, scales, fast=FAST_BACKWARD)
        problem = "" if (out - exact).norm() < 2e-3 * exact.norm() else "it gives a wrong result"
    except (ImportError, RuntimeError) as error:
        problem = str(error)
    if problem:
        log.warning("FP8 weight gradients are added after their product, which takes longer: %s", problem)
    return not problem
