"""Causes are ranked by what was measured; noise makes none."""

from __future__ import annotations

from typing import Any

import diagnosis_samples as samples
import numpy as np
import pytest

from pretrainkit.diagnosis.causes import CAUSES
from pretrainkit.diagnosis.checks import FINE, NOT_APPLICABLE, UNCERTAIN, check_settings
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.findings import Findings, find
from pretrainkit.diagnosis.spec import PROBES


def findings(*ranks: dict[str, Any]) -> Findings:
    """What some ranks' windows show."""
    return find(list(map(Evidence, ranks)), kind="script")


def noted(found: Findings, *states: str) -> dict[str, str]:
    """What was noted in one of these states: probe -> what was found."""
    return {check.what: check.found for check in found.checks if check.state in states}


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
        ({"larger_micro_batch": 0.4, "attention": 0.2}, ["larger_micro_batch", "attention"]),
        ({"data": 0.5, "workers_2": 0.45}, ["workers"]),
        ({"data": 0.2, "packing": 0.5}, ["packing", "workers"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_planted_causes_are_ranked_by_their_share(saved: dict[str, float], expected: list[str]) -> None:
    found = findings(samples.rank_result(np.random.default_rng(0), saved))
    assert [cause.name for cause in found.causes] == expected
    data = saved.get("data", 0.0)
    wanted = {"packing": saved.get("packing", 0) * (1 - data), "workers": saved.get("workers_2", data), "data": data}
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
    (cause,) = findings(rank).causes
    assert cause.name == "data" and cause.known == "at most"
    assert "with 2 workers 0.0%" in cause.seen


def test_time_for_data_is_one_cause_with_what_the_workers_were_measured_to_save() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.6, "workers_4": 0.4}, num_workers=1)
    (cause,) = findings(rank).causes
    assert cause.name == "workers" and cause.known == "measured"
    assert cause.share.value == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("dataset", ["TensorDataset", "list"])
def test_samples_in_memory_are_not_to_be_prepared(dataset: str) -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"data": 0.5})
    rank["facts"]["loader"]["dataset"] = dataset
    (cause,) = findings(rank).causes
    assert "tokenize" not in cause.change and "decode" not in cause.change and dataset in cause.change


def test_a_saving_of_wall_time_without_cpu_time_is_doubted() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"attention": 0.3})
    for pair in rank["pairs"]["attention"]:
        pair["after_cpu_s"] = pair["before_cpu_s"]
    found = findings(rank)
    assert found.causes == []
    assert "CPU time" in noted(found, UNCERTAIN)["attention kernel"]


def test_the_slowest_rank_is_named() -> None:
    generator = np.random.default_rng(0)
    fast = samples.rank_result(generator, {"exchange": 0.6}, world_size=2)
    slow = samples.rank_result(generator, {"exchange": 0.05}, rank=1, world_size=2)
    found = findings(fast, slow)
    assert found.causes[0].name == "slow_rank"
    assert "rank 1 on node1" in found.causes[0].title
    share = found.causes[0].share
    assert share.value == pytest.approx(0.55, abs=0.1)
    assert share.low <= share.value - 0.04  # ranks that arrive together may pay for the exchange twice


def test_equal_ranks_have_no_slowest() -> None:
    generator = np.random.default_rng(0)
    ranks = [samples.rank_result(generator, {"exchange": 0.2}, rank=rank, world_size=2) for rank in range(2)]
    found = findings(*ranks)
    assert found.causes == []
    assert "speed of the ranks" in noted(found, FINE, UNCERTAIN)


def test_what_does_not_apply_is_not_called_fine() -> None:
    found = findings(samples.rank_result(np.random.default_rng(0)))
    assert noted(found, NOT_APPLICABLE) == {"anomaly detection": "off"}
    assert "anomaly detection" not in noted(found, FINE)


@pytest.mark.parametrize(("rounds", "is_shown"), [(1, False), (2, True), (4, True)])
def test_few_rounds_show_a_large_cause(rounds: int, is_shown: bool) -> None:
    """Steps of seconds leave time for a few windows alone."""
    rank = samples.rank_result(np.random.default_rng(0), {"packing": 0.76}, disturbed=0.0)
    rank["pairs"] = {name: pairs[:rounds] for name, pairs in rank["pairs"].items()}
    found = findings(rank)
    assert [cause.name for cause in found.causes] == (["packing"] if is_shown else [])
    for cause in found.causes:
        assert 0 <= cause.share.low < cause.share.value < cause.share.high <= 1
        assert cause.share.value == pytest.approx(0.76, abs=0.03)
    if not is_shown:
        padding = noted(found, UNCERTAIN)["padding"]
        assert "too few rounds (1)" in padding and "0.0% to" in padding


def test_a_change_that_was_not_measured_is_uncertain() -> None:
    rank = samples.rank_result(np.random.default_rng(0))
    del rank["pairs"]["threads"]
    assert "no time was left" in noted(findings(rank), UNCERTAIN)["CPU threads"]


def test_padding_of_few_batches_widens_the_interval() -> None:
    rank = samples.rank_result(np.random.default_rng(0), {"packing": 0.4})
    narrow = findings(rank).causes[0].share
    rank["seen"] = [{**rank["seen"][0], "real_tokens": real} for real in (200, 60, 220)]
    wide = findings(rank).causes[0].share
    assert wide.value == narrow.value and wide.high - wide.low > 2 * (narrow.high - narrow.low)


@pytest.mark.parametrize(("reads", "expected"), [({"item at train.py:3": 8}, ["logging"]), ({}, [])])
def test_time_between_the_phases_is_logging_where_the_loop_reads_values(
    reads: dict[str, int], expected: list[str]
) -> None:
    rank = samples.rank_result(np.random.default_rng(0), disturbed=0.0)
    for window in rank["windows"]:
        window["phases_s"] = {"forward": 0.3, "other": 0.1}
    rank["observed"]["reads"] = reads
    causes = findings(rank).causes
    assert [cause.name for cause in causes] == expected
    for cause in causes:
        assert cause.share.value == pytest.approx(0.25) and cause.known == "at most" and "train.py:3" in cause.seen


def test_every_probe_has_a_row() -> None:
    assert {probe for probe in PROBES if not probe.startswith("workers_")} <= set(CAUSES)


def test_settings_are_advised_and_not_measured() -> None:
    rank = samples.rank_result(np.random.default_rng(0), num_workers=2)
    assert check_settings(rank) == []
    rank["facts"]["loader"]["batches"] = 40
    rank["facts"] |= {"deterministic": True, "device": "NVIDIA H200"}
    rank["facts"]["optimizers"] = [{"class": "Adam", "fused": False}]
    rank["facts"]["tokenizer"] = {"padding_side": "left", "pad_token_id": 2, "eos_token_id": 2}
    found = check_settings(rank)
    assert {check.what for check in found} == {
        *("pinned memory", "workers of an epoch", "precision", "deterministic algorithms", "fused optimizer"),
        *("padding side", "padding token"),
    }
    assert all(check.change for check in found)
    rank["facts"]["tokenizer"] = {"padding_side": "right", "pad_token_id": None, "eos_token_id": None}
    assert "padding token" not in {check.what for check in check_settings(rank)}


def test_a_change_that_may_save_much_is_not_called_fine() -> None:
    rank = samples.rank_result(np.random.default_rng(0))
    for number, pair in enumerate(rank["pairs"]["tf32"]):
        pair["after_s"] = [step_s * (3.0 if number % 2 else 0.5) for step_s in pair["after_s"]]
    found = findings(rank)
    assert "TF32" in noted(found, UNCERTAIN)
    assert "CPU threads" in noted(found, FINE)
