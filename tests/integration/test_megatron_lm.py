"""Megatron-LM's own code loads what conversion writes, and conversion reads what it saves.

Skipped unless MEGATRON_LM names a checkout of Megatron-LM (core_r0.15.0 or later).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrainkit.checkpoint.convert import Report, convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options

CHECKOUT = os.environ.get("MEGATRON_LM", "")
SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]


def needed_flags(report: Report, checkpoint: Path) -> list[str]:
    """The flags that the report of a conversion says Megatron-LM needs."""
    (note,) = (note for note in report.notes if note.startswith("Megatron-LM needs"))
    return note.partition(": ")[2].replace("CHECKPOINT", str(checkpoint)).split()


@pytest.mark.parametrize("kind", [CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_megatron_lm_loads_runs_and_saves_a_model(
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    name: str,
    kind: CheckpointFormat,
) -> None:
    from transformers import AutoModelForCausalLM

    source = shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), tmp_path / "hf")
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, source)
    report = convert(source, tmp_path / "checkpoint", Options(kind, parallelism=Parallelism(2, 2)))
    tokens = torch.randint(0, 320, (1, 64), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    flags = [*needed_flags(report, tmp_path / "checkpoint"), "--ckpt-format", str(kind)]
    _run_megatron_lm(tmp_path / "checkpoint", tmp_path / "saved", tmp_path / "tokens.pt", *flags)

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits
    logits = torch.load(tmp_path / "logits.pt")[..., :320]
    assert expected.std() > 0.1 and (logits - expected).abs().max() < 2e-5
    convert(tmp_path / "saved", tmp_path / "back", Options(hf_folder=source))
    assert_same(source, tmp_path / "back")


def _run_megatron_lm(*arguments: object) -> None:
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_lm", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
