"""Which checkpoints are to be evaluated, and what becomes of their scores."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from pretrainkit.config.run_file import write_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.run import checkpoints, evaluations
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.retention import apply_retention


def asked(run: ResolvedRun, tmp_path: Path, **training: object) -> ResolvedRun:
    settings = dataclasses.replace(run.config.training, save_interval=10, **training)  # type: ignore[arg-type]
    return dataclasses.replace(
        run, experiment_dir=str(tmp_path), max_steps=45, config=dataclasses.replace(run.config, training=settings)
    )


def test_every_nth_save_interval_and_the_last_step_are_due(
    make_run: Callable[..., ResolvedRun], tmp_path: Path
) -> None:
    run = asked(make_run(), tmp_path, eval_tasks=("a",), eval_saves=2)
    assert [step for step in range(1, 46) if evaluations.is_due(run, step)] == [20, 40, 45]
    assert not evaluations.is_due(asked(make_run(), tmp_path), 20)


def test_what_is_due_is_pending_until_it_has_results(make_run: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    run = asked(make_run(), tmp_path, eval_tasks=("a",))
    folder = RunFolder(tmp_path)
    assert evaluations.pending(folder) == []
    for step in (10, 20, 30):
        evaluations.mark_due(run, step)
    (folder.evaluations / "step_00000020.due").rename(folder.evaluations / "step_00000020.submitted")
    write_run(folder.run_file, run)
    scores = {"a": {"acc": 0.5}}
    assert evaluations.record(folder.checkpoint(10), scores, {"results": {"a": {"acc,none": 0.5}}})
    evaluations.give_up(folder.checkpoint(30))
    assert evaluations.pending(folder) == [folder.checkpoint(20)]
    (record,) = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert (record["event"], record["step"], record["tasks"]) == ("evaluation", 10, scores)


def test_results_of_further_tasks_are_added(make_run: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_run(folder.run_file, asked(make_run(), tmp_path))
    for task in "ab":
        evaluations.record(folder.checkpoint(10), {task: {"acc": 1.0}}, {"results": {task: {"acc,none": 1.0}}})
    assert json.loads(evaluations.results_file(folder, 10).read_text())["results"].keys() == {"a", "b"}
    assert not evaluations.record(tmp_path / "released", {}, {"results": {}})


def test_checkpoints_are_kept_for_their_evaluation_but_not_for_ever(
    make_run: Callable[..., ResolvedRun], tmp_path: Path
) -> None:
    run = asked(make_run(), tmp_path, eval_tasks=("a",), keep_last=2)
    folder = RunFolder(tmp_path)
    write_run(folder.run_file, run)

    def save_and_clean(*steps: int) -> list[int]:
        for step in steps:
            path = folder.checkpoint(step)
            (path / "weights").mkdir(parents=True)
            (path / "weights/.metadata").write_bytes(b"index")
            checkpoints.commit(checkpoints.Checkpoint(path, step=step, consumed_samples=step, global_batch_size=1))
            evaluations.mark_due(run, step)
        apply_retention(run)
        return [checkpoint.step for checkpoint in checkpoints.all_complete(folder.checkpoints)]

    assert save_and_clean(10, 20, 30) == [10, 20, 30]
    evaluations.record(folder.checkpoint(10), {}, {"results": {}})
    evaluations.give_up(folder.checkpoint(20))
    assert save_and_clean(40) == [30, 40]
    assert save_and_clean(50) == [30, 40, 50]
    evaluations.record(folder.checkpoint(40), {}, {"results": {}})
    assert save_and_clean(60) == [30, 50, 60]  # 40 has its scores
    since_s = time.time() - evaluations.LONGEST_WAIT_S
    os.utime(folder.evaluations / "step_00000030.due", (since_s - 1, since_s - 1))
    assert save_and_clean() == [50, 60]
    # Besides the two that are kept anyway, no more than two wait: 50 and 60 are removed.
    assert save_and_clean(70, 80, 90, 100) == [70, 80, 90, 100]
