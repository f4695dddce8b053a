"""The check of an image's kernels: a right kernel passes, a wrong one is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "containers" / "check_kernels.py"
spec = importlib.util.spec_from_file_location("check_kernels", SCRIPT)
assert spec and spec.loader
check_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_kernels)


@pytest.mark.parametrize("library", check_kernels.LIBRARIES)
def test_each_library_has_kernels_to_check(library: str) -> None:
    assert len(check_kernels.kernels({library})) > len(check_kernels.kernels(set()))


def test_a_kernel_with_a_wrong_result_is_found() -> None:
    import torch

    checks = check_kernels.kernels(set(), device="cpu")
    assert list(checks) == ["torch's attention"]
    checks["torch's attention"]()

    def not_causal(query: Any, key: Any, value: Any) -> Any:
        words = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*words).transpose(1, 2)

    with pytest.raises(ValueError, match="output is off by"):
        check_kernels._check_attention(not_causal, "cpu")
    with pytest.raises(ValueError, match="nan"):
        check_kernels.compare("output", torch.full((2,), float("nan")), torch.ones(2))


def test_the_check_of_swiglu_passes_a_right_kernel_and_not_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    swiglu = pytest.importorskip("liger_kernel.ops.swiglu")
    check_kernels._check_swiglu("cpu", "float32")  # Triton's interpreter has no bf16
    monkeypatch.setattr(swiglu, "swiglu_fused_gate_up_backward", lambda inputs, *_: torch.zeros_like(inputs))
    with pytest.raises(ValueError, match=r"gradient is off by 100\.0%"):
        check_kernels._check_swiglu("cpu", "float32")
