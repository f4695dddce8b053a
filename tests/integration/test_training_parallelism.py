"""One training, whatever the layout: the losses of every kind of parallelism are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


@pytest.fixture(scope="module")
def start(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that every layout starts from."""
    from pretrainkit.checkpoint.convert import convert

    folder = tmp_path_factory.mktemp("start") / "nemo"
    convert(tiny, folder)
    return folder


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor": 2},
    "TP=2 with SP": {"tensor": 2, "sequence_parallel": True},
    "PP=2": {"pipeline": 2},
    "CP=2": {"context": 2},
    "DP=2": {"data_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_equal_those_of_one_rank(
    tiny: Path, start: Path, train_tiny: Callable[..., Any], layout: dict[str, Any]
) -> None:
    one_rank = losses(train_tiny(tiny, "one rank", initial_checkpoint=start))
    parallel = losses(train_tiny(tiny, "parallel", initial_checkpoint=start, **layout))
    assert len(set(one_rank)) == 4
    assert parallel == pytest.approx(one_rank, abs=1e-6)
