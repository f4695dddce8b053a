"""Layers that are replayed train as layers that aren't: which tensors are copied, when gradients are told as done.

What a CUDA graph does is done by calling again (fused_ranks.Again); graphs themselves are tested in tests/gpu.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_ranks
import pytest
import ranks

from pretrainkit.training.records import read_metrics

pytestmark = pytest.mark.integration
LAYERS, BOTH_PASSES = 2, 2


def _values(records: list[dict[str, Any]]) -> list[float]:
    return [record[name] for record in records for name in ("loss", "grad_norm", "val_loss") if name in record]


@pytest.mark.parametrize(
    ("settings", "fused", "overlaps"),
    [
        ({}, False, False),
        ({"data_parallel": 2}, False, False),
        ({"data_parallel": 2}, False, True),
        ({"data_parallel": 2}, True, True),
        ({"val_interval": 2, "val_steps": 1}, False, False),
    ],
    ids=["one rank", "two ranks", "two that exchange meanwhile", "fused kernels, too", "with evaluations"],
)
def test_losses_and_gradients_are_those_of_launched_layers(
    settings: dict[str, Any],
    fused: bool,
    overlaps: bool,
    make_hf_llama: Callable[..., Path],
    train_tiny: Callable[..., Any],
    write_tiny_run: Callable[..., Path],
) -> None:
    model, steps, samples = make_hf_llama(), 3, 4
    settings = {"max_steps": steps, "micro_batch_size": 1, "global_batch_size": samples} | settings
    launched = train_tiny(model, "launched", **settings)
    run_file = write_tiny_run(model, "replayed", **settings)
    num_ranks = settings.get("data_parallel", 1)
    ranks.run_ranks(
        fused_ranks.train_replaying, num_ranks, run_file.parent, run_file=run_file, fused=fused, overlaps=overlaps
    )
    replayed = read_metrics(run_file.parent / "metrics.jsonl")
    assert _values(replayed) == pytest.approx(_values(launched), rel=1e-5 if fused else 1e-9)
    (count,) = re.findall(r"^replays: (\d+)$", (run_file.parent / "rank0.log").read_text(), re.MULTILINE)
    assert int(count) == steps * samples // num_ranks * LAYERS * BOTH_PASSES
