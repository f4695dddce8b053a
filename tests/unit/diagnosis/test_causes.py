"""Causes are ranked by what was measured; noise makes none."""

from __future__ import annotations

from typing import Any

import diagnosis_samples as samples
import numpy as np
import pytest

from pretrainkit.diagnosis.causes import Findings, find
from pretrainkit.diagnosis.evidence import Evidence


def findings(*ranks: dict[str, Any]) -> Findings:
    """What some ranks' windows show."""
    return find([Evidence(rank, confirmed_after=samples.CONFIRMED_AFTER) for rank in ranks], kind="script")


@pytest.mark.parametrize("disturbed", [0.0, 0.3])
def test_noise_makes_no_cause(disturbed: float) -> None:
    for seed in range(5):
        found = findings(samples.rank_result(np.random.default_rng(seed), disturbed=disturbed))
        assert [cause for cause in found.causes if cause.share.value > 0.05] == []


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"packing": 0.4, "threads": 0.1}, ["packing", "threads"]),
        ({"threads": 0.3}, ["threads"]),
        ({"micro_batch_x2": 0.4, "attention": 0.2}, ["micro_batch", "attention"]),
        ({"data": 0.5, "workers_2": 0.45}, ["workers"]),
        ({"data": 0.2, "packing": 0.5}, ["packing", "workers"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_planted_causes_are_ranked_by_their_share(saved: dict[str, float], expected: list[str]) -> None:
    found = findings(samples.rank_result(np.random.default_rng(0), saved))
    assert [cause.name for cause in found.causes] == expected
    data = saved.get("data", 0.0)
    wanted = {"packing": saved.get("packing", 0) * (1 - data), "workers": data}
    for cause in found.causes:
        if cause.name in wanted:
            assert cause.share.value == pytest.approx(wanted[cause.name], abs=0.03)
        assert cause.change
        assert cause.gain


def test_a_tokenizer_in_the_loop_is_the_cause_of_waiting_for_data() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.5, "workers_2": 0.3})
    rank["observed"]["samples"][0]["is_tokenizer"] = True
    found = findings(rank)
    assert found.causes[0].name == "tokenizing"
    assert "preprocess_data" in found.causes[0].change


def test_a_tokenizer_in_the_workers_is_seen_there() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.5}, num_workers=1)
    rank["worker_samples"] = [{"phase": "data", "where": "f (a.py:1)", "is_tokenizer": True, "count": 9}]
    assert findings(rank).causes[0].name == "tokenizing"


def test_workers_that_do_not_help_are_not_advised() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.5, "workers_2": -0.5})
    found = findings(rank)
    assert found.causes[0].name == "data"
    assert "more don't help" in found.causes[0].why


def test_too_few_workers_are_told_apart_from_slow_reading() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.6, "workers_4": 0.4}, num_workers=1)
    assert [cause.name for cause in findings(rank).causes] == ["workers", "data"]


def test_a_saving_of_wall_time_without_cpu_time_is_doubted() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"attention": 0.3})
    for window in rank["windows"]:
        if window["probe"] == "attention":
            window["cpu_s"] = window["before_cpu_s"]
    found = findings(rank)
    assert found.causes == []
    assert "CPU time" in found.uncertain[0]["found"]


def test_the_slowest_rank_is_named() -> None:
    generator = np.random.default_rng(0)
    fast = samples.rank_result(generator, {"exchange": 0.6}, world_size=2)
    slow = samples.rank_result(generator, {"exchange": 0.05}, rank=1, world_size=2)
    found = findings(fast, slow)
    assert found.causes[0].name == "slow_rank"
    assert "rank 1 on node1" in found.causes[0].title
    assert found.causes[0].share.value == pytest.approx(0.55, abs=0.1)


def test_equal_ranks_have_no_slowest() -> None:
    generator = np.random.default_rng(0)
    ranks = [samples.rank_result(generator, {"exchange": 0.2}, rank=rank, world_size=2) for rank in range(2)]
    assert [cause.name for cause in findings(*ranks).causes] == []


def test_what_was_not_applicable_is_told() -> None:
    fine = findings(samples.rank_result(np.random.default_rng(0))).fine
    assert {"what": "TF32", "found": "CUDA only"} in fine


def test_compiling_new_shapes_is_not_taken_for_reading() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.54})
    rank["observed"]["compiled_frames"] = 8
    for number, batch in enumerate(rank["observed"]["batches"]):
        rank["observed"]["batches"][number] = {**batch, "shape": [4, 60 + number]}
    found = findings(rank)
    # Half of what known batches save is spent waiting for data.
    assert {cause.name: round(cause.share.value, 1) for cause in found.causes} == {"new_shapes": 0.3, "workers": 0.3}
    rank["observed"]["compiled_frames"] = 0
    assert [cause.name for cause in findings(rank).causes] == ["workers"]


def test_workers_that_are_started_for_every_epoch() -> None:
    rank = samples.rank_result(np.random.default_rng(0), num_workers=2)
    rank["facts"]["loader"]["batches"] = 40  # 20 steps of 0.1 s
    rank["epoch_starts"] = {"new_s": [1.0, 1.1, 0.9], "kept_s": [0.1, 0.1, 0.1]}
    (cause,) = findings(rank).causes
    assert cause.name == "persistent_workers"
    assert cause.share.value == pytest.approx(0.9 / 2.9, abs=0.02)
    rank["facts"]["loader"]["batches"] = 4000
    assert not findings(rank).causes


def test_a_change_that_may_save_much_is_not_called_fine() -> None:
    rank = samples.rank_result(np.random.default_rng(0))
    for window in rank["windows"]:
        if window["probe"] == "fused_optimizer":
            factor = 3.0 if window["round"] % 2 else 0.5
            window["steps_s"] = [step_s * factor for step_s in window["steps_s"]]
    found = findings(rank)
    assert "fused optimizer" in [item["what"] for item in found.uncertain]
    assert "CPU threads" in [item["what"] for item in found.fine]
