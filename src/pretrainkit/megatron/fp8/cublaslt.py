"""FP8 products added to an fp32 matrix inside cuBLASLt.

torch._scaled_mm can't accumulate: a product in bf16 and its addition take 1.6 times as long as this for the weight
gradients of an 8B layer. The calls go to the cuBLASLt that torch has loaded, through NVIDIA's bindings (nvmath-python).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvmath.bindings import cublasLt as lt
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA recommends for Hopper."""
_COMPUTE_FP32, _FP32, _TRANSPOSED = 68, 0, 1  # CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_T
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # CUDA_R_8F_E4M3, CUDA_R_8F_E5M2
_ATTRIBUTE = lt.MatmulDescAttribute


@dataclass(frozen=True)
class _Plan:
    """A product's descriptors and the algorithm that cuBLASLt's heuristic puts first."""

    description: int
    layouts: tuple[int, int, int]
    algorithm: Any


class _Library:
    """A handle, and plans by shape."""

    def __init__(self) -> None:
        self._handle = lt.create()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._one = np.ones(1, np.float32)
        self._pointer = np.zeros(1, np.int64)
        self.plan = functools.cache(self._plan)

    def _set(self, description: int, attribute: int, value: np.ndarray) -> None:
        lt.matmul_desc_set_attribute(description, attribute, value.ctypes.data, value.nbytes)

    def _plan(
        self, rows: int, columns: int, inner: int, types: tuple[int, int], has_vectors: bool, fast: bool
    ) -> _Plan:
        description = lt.matmul_desc_create(_COMPUTE_FP32, _FP32)
        # cuBLASLt's matrices are column-major: its A is our right factor, and D is [columns, rows].
        mode = lt.MatmulMatrixScale.OUTER_VEC_32F if has_vectors else lt.MatmulMatrixScale.SCALAR_32F
        for attribute, value in (
            (_ATTRIBUTE.TRANSA, np.array([_TRANSPOSED], np.int32)),
            (_ATTRIBUTE.FAST_ACCUM, np.array([fast], np.int8)),
            (_ATTRIBUTE.A_SCALE_MODE, np.array([mode], np.int32)),
            (_ATTRIBUTE.B_SCALE_MODE, np.array([mode], np.int32)),
            # Any address: the heuristic looks at the alignment of the scales.
            (_ATTRIBUTE.A_SCALE_POINTER, np.array([self._workspace.data_ptr()], np.int64)),
            (_ATTRIBUTE.B_SCALE_POINTER, np.array([self._workspace.data_ptr()], np.int64)),
        ):
            self._set(description, attribute, value)
        right = lt.matrix_layout_create(types[1], inner, columns, inner)
        left = lt.matrix_layout_create(types[0], inner, rows, inner)
        out = lt.matrix_layout_create(_FP32, columns, rows, columns)
        preference = lt.matmul_preference_create()
        size = np.array([WORKSPACE_BYTES], np.uint64)
        lt.matmul_preference_set_attribute(
            preference, lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, size.ctypes.data, size.nbytes
        )
        results, count = np.zeros(1, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            self._handle, description, right, left, out, out, preference, 1, results.ctypes.data, count.ctypes.data
        )
        lt.matmul_preference_destroy(preference)
        if not count[0]:
            raise RuntimeError(f"cuBLASLt has no FP8 product [{rows}, {inner}] x [{inner}, {columns}] added to fp32")
        return _Plan(description, (right, left, out), results["algo"].copy())

    def add(
        self, out: Tensor, left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, fast: bool
    ) -> None:
        (rows, inner), columns = left.shape, right.shape[0]
        types = _TYPES[left.dtype], _TYPES[right.dtype]
        plan = self.plan(rows, columns, inner, types, left_scales.numel() == rows, fast)
        for attribute, scales in (
            (_ATTRIBUTE.A_SCALE_POINTER, right_scales),
            (_ATTRIBUTE.B_SCALE_POINTER, left_scales),
        ):
            self._pointer[0] = scales.data_ptr()
            self._set(plan.description, attribute, self._pointer)
        one, into = self._one.ctypes.data, out.data_ptr()
        lt.matmul(
            self._handle,
            plan.description,
            one,
            right.data_ptr(),
            plan.layouts[0],
            left.data_ptr(),
            plan.layouts[1],
            one,
            into,
            plan.layouts[2],
            into,
            plan.layouts[2],
            plan.algorithm.ctypes.data,
            self._workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )


_library = functools.cache(_Library)


def add(out: Tensor, left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, *, fast: bool) -> None:
    """out [n, m] fp32 += (left [n, k] x its scales [n]) (right [m, k] x its scales [m])^T, or with scales [1] each.

    k, n and m must be multiples of 16. `fast`: sums within the tensor core have fewer bits. Raises RuntimeError where
    cuBLASLt has no such product.
    """
    _library().add(out, left, left_scales, right, right_scales, fast)
