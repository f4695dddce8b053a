"""Tensor-parallel products that go on while their exchange does, against Megatron's, however late parts arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import exchange_ranks
import pytest
import ranks

from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("world_size", [2, 4])
def test_products_and_gradients_are_those_of_one_rank(tmp_path: Path, world_size: int) -> None:
    ranks.run_ranks(exchange_ranks.compare_on_cpu, world_size, tmp_path, shared=tmp_path, rounds=10)


def test_a_run_has_the_losses_of_megatrons_layers(
    tmp_path: Path,
    make_hf_llama: Callable[..., Path],
    train_tiny: Callable[..., Any],
    write_tiny_run: Callable[..., Path],
) -> None:
    model, settings = make_hf_llama(), {"tensor": 2, "sequence_parallel": True, "max_steps": 4}
    plain = [record["loss"] for record in train_tiny(model, "plain", **settings) if "loss" in record]
    run_file = write_tiny_run(model, "overlapped", **settings)
    ranks.run_ranks(exchange_ranks.train, 2, run_file.parent, run_file=run_file, shared=tmp_path)
    records = read_records(run_file.parent / "metrics.jsonl")
    assert [record["loss"] for record in records if "loss" in record] == pytest.approx(plain, abs=1e-6)
    used = next(record["kernels"] for record in records if record.get("event") == "start")
    assert (used["tp_comm_overlap"], used["attention"]) == ("copies", "cpu")
