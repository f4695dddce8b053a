"""Training with FP8 products, emulated on the CPU: losses, layouts, resume, and the comparison with bf16."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_ranks
import pytest
import ranks
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.config.schema import Recompute
from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
FP8 = {"precision": "fp8", "fp8_emulation": True, "fp8_check_interval": 2}


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def checks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == "fp8"]


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


@pytest.fixture(scope="module")
def start(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "nemo"
    convert(tiny, folder)
    return folder


@pytest.fixture(scope="module")
def train(
    tiny: Path, start: Path, train_tiny_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Train and get the metrics records; each run is made once."""

    @functools.cache
    def trained(settings: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
        return train_tiny_in(tmp_path_factory.mktemp("runs"), tiny, "run", initial_checkpoint=start, **dict(settings))

    return lambda **settings: trained(tuple(settings.items()))


def test_losses_are_near_those_of_bf16(train: Callable[..., Any]) -> None:
    bf16 = losses(train(precision="bf16"))
    for recipe in ("rowwise", "tensorwise", "rowwise_wgrad_bf16"):
        found = losses(train(**FP8, fp8_recipe=recipe))
        print(recipe, found, bf16)
        assert found == pytest.approx(bf16, abs=0.02)
        assert found != bf16


def test_checks_and_ranges_are_recorded(train: Callable[..., Any]) -> None:
    found = checks(train(**FP8))
    assert [event["step"] for event in found] == [1, 3]
    for event in found:
        assert event["fp8_loss"] == pytest.approx(event["bf16_loss"], abs=0.02)
        assert event["fp8_loss"] != event["bf16_loss"]
        assert len(event["tensors"]) == 8  # inputs and output gradients of four kinds of layers
        for values in event["tensors"].values():
            assert values["not_finite"] == 0
            assert -40 < values["smallest_scale"] <= values["largest_scale"] < 10


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor": 2},
    "TP=2 with SP": {"tensor": 2, "sequence_parallel": True},
    "PP=2": {"pipeline": 2},
    "CP=2": {"context": 2},
    "DP=2": {"data_parallel": 2},
    "all layers recomputed": {"recompute": Recompute("full", 2)},
    "MLPs recomputed, TP=2 with SP": {"recompute": Recompute("selective"), "tensor": 2, "sequence_parallel": True},
}


RUNS = [
    *(("rowwise", name) for name in LAYOUTS),
    *((recipe, "TP=2 with SP") for recipe in ("tensorwise", "rowwise_wgrad_bf16")),
]


@pytest.mark.parametrize(("recipe", "name"), RUNS, ids=[f"{recipe} {name}" for recipe, name in RUNS])
def test_losses_of_layouts_are_near_those_of_one_rank(recipe: str, name: str, train: Callable[..., Any]) -> None:
    one_rank, found = train(**FP8, fp8_recipe=recipe), train(**FP8, fp8_recipe=recipe, **LAYOUTS[name])
    assert losses(found) == pytest.approx(losses(one_rank), abs=2e-3)
    if name == "DP=2":
        return  # its first microbatches are two samples
    for ours, theirs in zip(checks(found), checks(one_rank), strict=True):
        for loss in ("fp8_loss", "bf16_loss"):
            assert ours[loss] == pytest.approx(theirs[loss], abs=2e-3)


def test_gathering_fp8_is_casting_what_was_gathered(train: Callable[..., Any]) -> None:
    """With sequence parallelism FP8 is sent, without it every rank casts all rows."""
    with_sp, without = (losses(train(**FP8, **LAYOUTS[name])) for name in ("TP=2 with SP", "TP=2"))
    assert with_sp == pytest.approx(without, abs=1e-4)  # sums over ranks are rounded to bf16 in another order


def test_weights_are_gathered_before_they_are_cast(
    train: Callable[..., Any], tiny: Path, start: Path, write_tiny_run: Callable[..., Path]
) -> None:
    """DP ranks gather weights while they compute; a layer's own hook waits for those of its linear layers."""
    run_file = write_tiny_run(tiny, "gathering", initial_checkpoint=start, **FP8, **LAYOUTS["DP=2"])
    ranks.run_ranks(fused_ranks.train_gathering, 2, run_file.parent, run_file=run_file)
    gathering = read_records(run_file.with_name("metrics.jsonl"))
    assert losses(gathering) == losses(train(**FP8, **LAYOUTS["DP=2"]))


def test_a_run_continues_exactly_and_may_change_its_precision(
    train: Callable[..., Any], tiny: Path, start: Path, train_tiny: Callable[..., Any]
) -> None:
    settings = {"initial_checkpoint": start, "save_interval": 2}
    # Copies of weights that outlive a step would show: the second start makes its own.
    train_tiny(tiny, "stopped", max_steps=2, **settings, **FP8)
    assert losses(train_tiny(tiny, "stopped", max_steps=4, **settings, **FP8)) == losses(train(**FP8))
    train_tiny(tiny, "changed", max_steps=2, precision="bf16", **settings)
    changed = losses(train_tiny(tiny, "changed", max_steps=4, **settings, **FP8))
    assert changed[:2] == losses(train(precision="bf16"))[:2]
    assert changed == pytest.approx(losses(train(precision="bf16")), abs=0.02)
    back = losses(train_tiny(tiny, "changed", max_steps=6, precision="bf16", **settings))
    assert back[:4] == changed
    assert back[4:] == pytest.approx(losses(train(max_steps=6, precision="bf16"))[4:], abs=0.02)


def test_fp8_that_loses_too_much_stops_the_run(tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any]) -> None:
    """One channel's activations are far larger than all others, and its weights as much smaller."""
    spoiled = tmp_path / "spoiled"
    shutil.copytree(tiny, spoiled)
    tensors = load_file(spoiled / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[0] *= 2.0**20
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, 0] *= 2.0**-20
    tensors["lm_head.weight"] *= 64
    save_file(tensors, spoiled / "model.safetensors", metadata={"format": "pt"})
    convert(spoiled, tmp_path / "nemo")
    train_tiny(spoiled, "bf16", initial_checkpoint=tmp_path / "nemo", precision="bf16")
    with pytest.raises(AssertionError, match=r"in FP8 and .* in bf16, of the same weights and tokens"):
        train_tiny(spoiled, "fp8", initial_checkpoint=tmp_path / "nemo", **FP8)
    (check,) = checks(read_records(tmp_path / "fp8" / "metrics.jsonl"))
    assert abs(check["fp8_loss"] - check["bf16_loss"]) > 0.1
    assert max(range_["underflow"] for range_ in check["tensors"].values()) > 0.5
    assert not losses(read_records(tmp_path / "fp8" / "metrics.jsonl"))
