"""Which of torch's kernels attention has, and what is said when it isn't the fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.megatron import attention_kernels
from pretrainkit.megatron.attention_kernels import BlockKernel, CuDnn, Flash

MISMATCH = "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found runtime version (9, 14, 0)"


@pytest.mark.parametrize(
    ("capability", "kernel", "told"),
    [((9, 0), Flash, True), ((9, 0), CuDnn, False), ((10, 0), Flash, True), ((8, 0), Flash, False)],
    ids=["Hopper without cuDNN", "Hopper", "Blackwell without cuDNN", "Ampere"],
)
def test_a_slow_kernel_is_told_with_torchs_reason(
    make_run: Callable[..., ResolvedRun],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    kernel: type[BlockKernel],
    told: bool,
) -> None:
    def refuse() -> int:
        raise RuntimeError(MISMATCH)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options | {"device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    monkeypatch.setattr(attention_kernels, "block_kernel", lambda block: kernel())
    monkeypatch.setattr(attention_kernels.log, "propagate", True)
    run = dataclasses.replace(make_run(), accelerator="gpu", precision="bf16")
    assert attention_kernels.attention_kernel(run) == kernel.name
    assert (MISMATCH in caplog.text) == told


def test_on_cpu_there_is_one_kernel(make_run: Callable[..., ResolvedRun]) -> None:
    assert attention_kernels.attention_kernel(dataclasses.replace(make_run(), accelerator="cpu")) == "cpu"
