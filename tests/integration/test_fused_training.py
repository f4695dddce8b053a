"""Training with every fused kernel, in Triton's interpreter, has the losses and gradient norms of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_ranks
import pytest
import ranks

from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tensor_parallel_ranks_have_the_losses_of_plain_torch(
    tied: bool,
    make_hf_llama: Callable[..., Path],
    train_tiny: Callable[..., Any],
    write_tiny_run: Callable[..., Path],
) -> None:
    model = make_hf_llama(tie_word_embeddings=tied)
    settings = {"tensor": 2, "sequence_parallel": True, "max_steps": 2, "global_batch_size": 2}
    plain = train_tiny(model, "plain", **settings)
    run_file = write_tiny_run(model, "fused", **settings)
    ranks.run_ranks(fused_ranks.train, 2, run_file.parent, run_file=run_file)
    fused = read_records(run_file.parent / "metrics.jsonl")
    for name in ("loss", "grad_norm"):
        values = [[record[name] for record in records if "loss" in record] for records in (fused, plain)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
