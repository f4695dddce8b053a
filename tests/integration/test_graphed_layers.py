"""Layers that are replayed train as layers that aren't: which tensors are copied, when gradients are told as done.

What a CUDA graph does is done by calling again (fused_ranks.Again); graphs themselves are tested in tests/gpu.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_ranks
import pytest
import ranks

from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
LAYERS, BOTH_PASSES = 2, 2


def _values(records: list[dict[str, Any]]) -> list[float]:
    return [record[name] for record in records for name in ("loss", "grad_norm", "val_loss") if name in record]


CASES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "one rank": ("llama", {}, False, False),
    "two ranks": ("llama-tied", {"data_parallel": 2}, False, False),
    "two that exchange meanwhile": ("llama", {"data_parallel": 2}, False, True),
    "fused kernels, too": ("llama", {"data_parallel": 2}, True, True),
    "with evaluations": ("llama", {"val_interval": 2, "val_steps": 1}, False, False),
    "scaled rotary": ("llama3-rope", {}, False, False),
    "biases": ("qwen2", {}, False, False),
    "norms of queries and keys": ("qwen3", {}, False, False),
}
"""Model, settings of the run, fused kernels, exchanges that overlap."""


@pytest.mark.parametrize(("name", "settings", "fused", "overlaps"), CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_are_those_of_launched_layers(
    name: str,
    settings: dict[str, Any],
    fused: bool,
    overlaps: bool,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., Any],
    write_tiny_run: Callable[..., Path],
) -> None:
    model = shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2, num_hidden_layers=LAYERS), tmp_path / "hf")
    shutil.copytree(tokenizer_folder, model, dirs_exist_ok=True)
    steps, samples = 3, 4
    settings = {"max_steps": steps, "micro_batch_size": 1, "global_batch_size": samples} | settings
    launched = train_tiny(model, "launched", **settings)
    run_file = write_tiny_run(model, "replayed", **settings)
    num_ranks = settings.get("data_parallel", 1)
    ranks.run_ranks(
        fused_ranks.train_replaying, num_ranks, run_file.parent, run_file=run_file, fused=fused, overlaps=overlaps
    )
    replayed = read_records(run_file.parent / "metrics.jsonl")
    assert _values(replayed) == pytest.approx(_values(launched), rel=1e-5 if fused else 1e-9)
    (count,) = re.findall(r"^replays: (\d+)$", (run_file.parent / "rank0.log").read_text(), re.MULTILINE)
    assert int(count) == steps * samples // num_ranks * LAYERS * BOTH_PASSES
