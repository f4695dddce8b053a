"""What a start does is known before it starts, from the files alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.run.lr_schedule import learning_rate
from pretrainkit.run.resume_plan import CONTINUE, RANDOM, WEIGHTS, check_start, plan_start, prepare

MakeRun = Callable[..., ResolvedRun]
Save = Callable[..., Any]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(
    tmp_path: Path, make_run: Callable[..., ResolvedRun]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"event": "start", "step": 0}\n{"step": 1}\n')
    assert plan_start(make_run()).mode == RANDOM  # it never saved
    with metrics.open("a") as file:
        file.write('{"event": "checkpoint", "step": 4, "path": "x"}\n{"event": "checkpoint", "step": 8, "path": "x"}\n')
    with pytest.raises(
        CheckpointError, match=r"saved at step 8(.|\n)*step_00000008(.|\n)*move the experiment's folder"
    ):
        plan_start(make_run())


def test_a_torn_line_hides_no_checkpoint_that_is_gone(tmp_path: Path, make_run: MakeRun) -> None:
    line = '{"event": "checkpoint", "step": 4, "path": "x"}\n'
    (tmp_path / "metrics.jsonl").write_text(line + '{"event": "checkpoint", "st')
    with pytest.raises(CheckpointError, match="saved at step 4"):
        plan_start(make_run())
    # It is written when the checkpoint is there.
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "checkpoint", "st')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl has a record of one; the record is torn"):
        plan_start(make_run())


def test_an_unfinished_save_counts_as_the_first_where_metrics_tell_so(tmp_path: Path, make_run: MakeRun) -> None:
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"without complete\.json, and no metrics\.jsonl(.|\n)*from a backup"):
        plan_start(make_run())
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n{"step": 1}\n')
    assert plan_start(make_run()).mode == RANDOM


def test_attempts_that_left_nothing_but_logs_are_told(
    tmp_path: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_start(make_run()) == RANDOM and not caplog.text
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    assert check_start(make_run()) == RANDOM
    assert "no checkpoint and no metrics.jsonl: starting from the beginning" in caplog.text


@pytest.mark.parametrize("state", ["param", "fp32_param", "exp_avg_sq"])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_optimizer_state_of_another_kind_needs_a_flag(
    make_run: MakeRun, save: Save, state: str, distributed: bool, precision: str
) -> None:
    def run(**training: Any) -> ResolvedRun:
        made = make_run(**training)
        optimizer = replace(made.config.optimizer, distributed=distributed)
        return replace(made, precision=precision, config=replace(made.config, optimizer=optimizer))

    save(6, state=state)
    if state == ("param" if distributed else "fp32_param" if precision == "bf16" else "exp_avg_sq"):
        assert plan_start(run()).optimizer_state == "restored"
        return
    with pytest.raises(RequestError, match=r"optimizer\.distributed(.|\n)*--reset_optimizer"):
        plan_start(run())
    assert plan_start(run(reset_optimizer=True)).optimizer_state == "reset"
    save(8, state=state, optimizer_was_reset=True)
    assert plan_start(run(reset_optimizer=True)).optimizer_state == "reset"


def test_a_new_run_starts_from_random_or_given_weights(make_run: MakeRun) -> None:
    plan = plan_start(make_run())
    assert (plan.mode, plan.checkpoint, plan.step, plan.optimizer_state) == (RANDOM, None, 0, "zero")
    plan = plan_start(make_run(initial_checkpoint="/weights"))
    assert (plan.mode, plan.checkpoint, plan.step, plan.optimizer_state) == (WEIGHTS, "/weights", 0, "zero")
    assert plan.learning_rate == pytest.approx(1e-3 / 3)  # the first of two steps of warm-up


def test_a_run_with_checkpoints_continues(make_run: MakeRun, save: Save) -> None:
    run, checkpoint = make_run(initial_checkpoint="/weights"), save(6)
    plan = plan_start(run)
    assert (plan.mode, plan.checkpoint, plan.step) == (CONTINUE, str(checkpoint.path), 6)
    assert (plan.consumed_samples, plan.epoch, plan.sample) == (24, 2, 4)
    assert plan.learning_rate == learning_rate(run, 6)
    assert plan.optimizer_state == "restored" and plan.step < plan.max_steps
    assert "sample 4 of epoch 3" in plan.describe() and "continuing" in plan.describe()


def test_a_finished_run_has_no_next_step(make_run: MakeRun, save: Save) -> None:
    save(20)
    plan = plan_start(make_run())
    assert plan.step >= plan.max_steps and plan.learning_rate is None and "none left" in plan.describe()


def test_a_schedule_starts_again_at_a_step_that_is_done(make_run: MakeRun, save: Save) -> None:
    def rewarmed(step: int) -> ResolvedRun:
        run = make_run()
        optimizer = replace(run.config.optimizer, lr_rewarm_step=step)
        return replace(run, config=replace(run.config, optimizer=optimizer))

    with pytest.raises(RequestError, match="--lr_rewarm_step: the schedule starts again at step 6, and 0 steps"):
        plan_start(rewarmed(6))
    save(6)
    assert plan_start(rewarmed(6)).learning_rate == pytest.approx(1e-4 + 9e-4 / 3)
    with pytest.raises(RequestError, match="set it to 6"):
        plan_start(rewarmed(7))


def test_a_blend_has_no_epochs(make_run: MakeRun, save: Save) -> None:
    save(6)
    plan = plan_start(make_run(blend=True))
    assert (plan.epoch, plan.sample) == (None, 24)


def test_another_batch_size_needs_a_flag(make_run: MakeRun, save: Save) -> None:
    save(6)
    with pytest.raises(RequestError, match=r"trained with 4 samples a step, now 2(.|\n)*--allow_batch_change"):
        plan_start(make_run(global_batch_size=2))
    run = make_run(global_batch_size=2, allow_batch_change=True)
    plan = plan_start(run)
    assert (plan.step, plan.consumed_samples, plan.max_steps, plan.last_sample(run)) == (6, 24, 20, 52)


def test_a_checkpoint_that_does_not_tell_its_batch_size_is_continued(make_run: MakeRun, save: Save) -> None:
    save(6, global_batch_size=None)
    assert plan_start(make_run(global_batch_size=2)).step == 6


def test_an_epoch_after_a_changed_batch_size_needs_its_steps_named(make_run: MakeRun, save: Save) -> None:
    save(1)
    flags = {"global_batch_size": 2, "allow_batch_change": True}
    with pytest.raises(RequestError, match=r"--max_steps(.|\n)*3 steps more, up to step 4"):
        plan_start(make_run(**flags, max_steps=None))
    save(3, consumed_samples=8, global_batch_size=2)  # and so for all later starts
    with pytest.raises(RequestError, match=r"1 steps more, up to step 4"):
        plan_start(make_run(**flags, max_steps=None))


def test_lost_moments_stop_the_run_unless_it_is_asked_for(make_run: MakeRun, save: Save) -> None:
    save(6, optimizer=False)
    with pytest.raises(CheckpointError, match=r"no optimizer state(.|\n)*--reset_optimizer"):
        plan_start(make_run())
    assert plan_start(make_run(reset_optimizer=True)).optimizer_state == "reset"


def test_the_same_command_resets_the_optimizer_once(make_run: MakeRun, save: Save) -> None:
    save(6)
    run = make_run(reset_optimizer=True)
    assert plan_start(run).optimizer_state == "reset"
    save(8, optimizer_was_reset=True)
    assert plan_start(run).optimizer_state == "restored"


def test_a_start_makes_room_for_its_first_save(make_run: MakeRun, save: Save, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(step)
    run = make_run(keep_last=2, keep_every=2)
    prepare(run, plan_start(run))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4
    run = make_run(keep_last=2)
    prepare(run, plan_start(run))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]


def test_planning_changes_nothing(make_run: MakeRun, save: Save, tmp_path: Path) -> None:
    save(6)
    (tmp_path / "checkpoints" / "step_00000009").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert plan_start(make_run()).step == 6
    assert sorted(tmp_path.rglob("*")) == before
