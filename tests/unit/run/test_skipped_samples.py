"""Samples that are left out count as if the data never had them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pretrainkit.config.schema import BranchPoint
from pretrainkit.run.resume_plan import plan_start
from pretrainkit.run.skipped_samples import SkippedSamples, add_skipped, read_skipped


@pytest.mark.parametrize("ranges", [(), ((0, 0),), ((3, 5), (6, 6), (9, 12)), ((0, 3), (15, 15))], ids=str)
def test_places_are_the_samples_that_are_not_left_out(ranges: tuple[tuple[int, int], ...]) -> None:
    left_out = {sample for first, last in ranges for sample in range(first, last + 1)}
    skipped = SkippedSamples(ranges)
    assert skipped.places(range(20)) == [sample for sample in range(40) if sample not in left_out][:20]
    assert skipped.count == len(left_out)


def test_a_rollback_may_leave_out_samples_around_those_of_another(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    assert read_skipped(run) == SkippedSamples()
    add_skipped(run, [4, 5, 6, 7], step=2)
    around = read_skipped(run).places(range(2, 6))
    assert around == [2, 3, 8, 9]
    add_skipped(run, around, step=1)
    assert read_skipped(run) == SkippedSamples(((2, 3), (4, 7), (8, 9)), num_rollbacks=2)
    assert read_skipped(run).place(2) == 10


def test_other_data_has_all_its_samples(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    add_skipped(run, [4, 5, 6, 7], step=2)
    for change in ({"data_hash": "other"}, {"weights": (1.0, 2.0)}):
        other = dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, **change))
        assert read_skipped(other) == SkippedSamples((), num_rollbacks=1)


def test_a_branch_leaves_out_what_its_parent_does(tmp_path: Path) -> None:
    parent = tiny_run(tmp_path / "parent")
    add_skipped(parent, [4, 5, 6, 7], step=2)
    branch = dataclasses.replace(tiny_run(tmp_path / "b"), branch=BranchPoint(str(tmp_path / "parent"), 6))
    assert read_skipped(branch) == read_skipped(parent)


def test_the_next_sample_of_a_plan_comes_after_those_that_are_left_out(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    add_skipped(run, [0, 1, 2, 3], step=1)
    plan = plan_start(run)
    assert (plan.consumed_samples, plan.sample) == (0, 4)
    assert "skipped    4 samples" in plan.describe()
