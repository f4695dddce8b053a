#!/usr/bin/env python
"""Runs a kernel of each installed library once, forward and backward, on this GPU, and compares with torch in fp32.

Part of `containers/check.sh`: an image's torch, Transformer Engine and flash attention must be built for each other and
for the GPU. Exit code 1 when a kernel fails or its result is wrong; each is named.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

LIBRARIES = ("transformer_engine.pytorch", "flash_attn", "liger_kernel")
TOKENS, HEADS, HEAD_SIZE, HIDDEN = 512, 8, 64, 1024
LARGEST_ERROR = 0.03
"""Of a bf16 kernel against fp32, relative to the largest value (rounding is 0.004, sums of a thousand of them 0.01)."""


def kernels(installed: set[str], device: str = "cuda") -> dict[str, Callable[[], None]]:
    """Name -> function that raises when the kernel is wrong, for the libraries that are installed."""
    checks: dict[str, Callable[[], None]] = {"torch's attention": lambda: _check_attention(_torch_attention, device)}
    if "liger_kernel" in installed:
        checks["liger-kernel's SwiGLU"] = lambda: _check_swiglu(device)
    if "transformer_engine.pytorch" in installed:
        checks["Transformer Engine's norm and linear"] = lambda: _check_te_linear(device)
        checks["Transformer Engine's attention"] = lambda: _check_attention(_te_attention, device)
    if "flash_attn" in installed:
        checks["flash attention"] = lambda: _check_attention(_flash_attention, device)
    return checks


def _check_attention(attention: Callable[[Any, Any, Any], Any], device: str) -> None:
    """Causal attention of [1, tokens, heads, head size] in bf16, forward and backward, against fp32 written out."""
    import torch

    torch.manual_seed(0)
    values = [torch.randn(1, TOKENS, HEADS, HEAD_SIZE, device=device) for _ in range(4)]
    *exact, upstream = values
    inputs = [value.to(torch.bfloat16).requires_grad_() for value in exact]
    found = attention(*inputs).reshape(1, TOKENS, HEADS, HEAD_SIZE)
    found.backward(upstream.to(torch.bfloat16))
    expected_inputs = [value.detach().float().requires_grad_() for value in inputs]
    query, key, value = (tensor.transpose(1, 2) for tensor in expected_inputs)
    scores = query @ key.transpose(2, 3) / HEAD_SIZE**0.5
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)
    expected = (scores.masked_fill(mask, float("-inf")).softmax(-1) @ value).transpose(1, 2)
    expected.backward(upstream.to(torch.bfloat16).float())
    compare("output", found, expected)
    for name, one, other in zip(("query", "key", "value"), inputs, expected_inputs, strict=True):
        compare(f"gradient of {name}", one.grad, other.grad)


def _torch_attention(query: Any, key: Any, value: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def _flash_attention(query: Any, key: Any, value: Any) -> Any:
    from flash_attn import flash_attn_func

    return flash_attn_func(query, key, value, causal=True)


def _te_attention(query: Any, key: Any, value: Any) -> Any:
    import transformer_engine.pytorch as te

    layer = te.DotProductAttention(HEADS, HEAD_SIZE, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal")
    return layer(query, key, value)


def _check_te_linear(device: str) -> None:
    """Transformer Engine's RMSNorm with the linear layer behind it, forward and backward, against torch in fp32."""
    import torch
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.LayerNormLinear(
        HIDDEN, HIDDEN, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device=device
    )
    inputs = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    found = layer(inputs)
    found.sum().backward()
    exact = inputs.detach().float().requires_grad_()
    normed = torch.nn.functional.rms_norm(exact, (HIDDEN,), layer.layer_norm_weight.detach().float(), layer.eps)
    expected = normed @ layer.weight.detach().float().t()
    expected.sum().backward()
    compare("output", found, expected)
    compare("gradient", inputs.grad, exact.grad)


def _check_swiglu(device: str, dtype: str = "bfloat16") -> None:
    """liger-kernel's SwiGLU as training has it, of gate and product in one tensor, which Triton compiles here."""
    import torch
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, 2 * HIDDEN, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    exact = inputs.detach().float().requires_grad_()  # before the backward pass, which may write over its inputs
    gate, up = exact.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    expected.sum().backward()
    found = LigerFusedGateUpSiLUMulFunction.apply(inputs)
    compare("output", found, expected)
    found.sum().backward()
    compare("gradient", inputs.grad, exact.grad)


def compare(what: str, found: Any, expected: Any) -> None:
    """Raise ValueError when a bf16 result is further from the exact one than rounding explains, or not a number."""
    error = float((found.detach().float() - expected.detach()).abs().max() / expected.detach().abs().max())
    if not error <= LARGEST_ERROR:
        raise ValueError(f"{what} is off by {error:.1%} of its largest value")


def main() -> int:
    """Run the kernels of what is installed; prints one line each."""
    import torch

    if not torch.cuda.is_available():
        print("kernels     skipped  no GPU")
        return 0
    installed: set[str] = set()
    code = 0
    # All before the first kernel: whoever imports Transformer Engine later gets another cuDNN than torch has loaded.
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]):
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"kernels     failed   import {name}: {type(error).__name__}: {error}")
                code = 1
            else:
                installed.add(name)
    for name, kernel in kernels(installed).items():
        begin_s = time.monotonic()
        try:
            kernel()
        except Exception as error:
            print(f"kernels     failed   {name}: {type(error).__name__}: {error}")
            code = 1
        else:
            print(f"kernels     ok       {name} ({time.monotonic() - begin_s:.1f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
