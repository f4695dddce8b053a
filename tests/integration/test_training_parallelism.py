"""One training, whatever the layout: the losses of every kind of parallelism are those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.schema import Recompute

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


@pytest.fixture(scope="module")
def train(
    tiny: Path, start: Path, train_tiny_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Train at a layout and get the metrics records; each run is made once."""

    @functools.cache
    def trained(settings: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
        return train_tiny_in(tmp_path_factory.mktemp("runs"), tiny, "run", initial_checkpoint=start, **dict(settings))

    return lambda **settings: trained(tuple(settings.items()))


RECOMPUTATIONS: dict[str, tuple[Recompute, dict[str, Any]]] = {
    "the MLPs": (Recompute("selective"), {}),
    "one layer": (Recompute("full", 1), {}),
    "all layers": (Recompute("full", 2), {}),
    "all layers, TP=2 with SP": (Recompute("full", 2), {"tensor": 2, "sequence_parallel": True}),
    "a layer of each stage": (Recompute("full", 1), {"pipeline": 2}),
}


@pytest.mark.parametrize(("recompute", "layout"), RECOMPUTATIONS.values(), ids=RECOMPUTATIONS.keys())
def test_recomputation_changes_no_loss_and_no_gradient(
    train: Callable[..., list[dict[str, Any]]], recompute: Recompute, layout: dict[str, Any]
) -> None:
    kept, again = train(**layout), train(**layout, recompute=recompute)
    assert losses(again)[0] == losses(kept)[0]
    assert losses(again) == pytest.approx(losses(kept), abs=1e-6)
    norms = [[record["grad_norm"] for record in records if "loss" in record] for records in (again, kept)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-6)


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor": 2},
    "TP=2 with SP": {"tensor": 2, "sequence_parallel": True},
    "PP=2": {"pipeline": 2},
    "CP=2": {"context": 2},
    "DP=2": {"data_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_equal_those_of_one_rank(train: Callable[..., list[dict[str, Any]]], layout: dict[str, Any]) -> None:
    one_rank = losses(train())
    assert len(set(one_rank)) == 4
    assert losses(train(**layout)) == pytest.approx(one_rank, abs=1e-6)
