from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from pretrainkit.engine.callbacks import before_steps


def test_weights_on_gpus_follow_the_seed_and_differ_by_pipeline_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 2)
    monkeypatch.setattr(before_steps, "model_parallel_cuda_manual_seed", seeds.append)
    nothing: Any = None
    before_steps.SeedWeights(7).setup(nothing, nothing, "fit")
    assert seeds == [207]
