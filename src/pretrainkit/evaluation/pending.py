"""Evaluates the checkpoints of an experiment that wait for it: `python -m pretrainkit.evaluation.pending EXPERIMENT`.

This is what follows saves with --eval_tasks, as a job of a scheduler or as a process of low priority on this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from pretrainkit import logs
from pretrainkit.config.run_file import read_run
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, PretrainkitError
from pretrainkit.evaluation.evaluate import ModelRequest, evaluate
from pretrainkit.evaluation.tasks import (
    Scores,
    TaskRequest,
    as_table,
    hide_progress_unless_on_a_terminal,
    scores_of,
)
from pretrainkit.run import evaluations
from pretrainkit.run.folder import RunFolder
from pretrainkit.signals import die_with_parent

LOWEST_PRIORITY = 19
"""Of a process that computes while the training does."""

log = logs.get_logger(__name__)


def evaluate_checkpoint(model: ModelRequest, tasks: TaskRequest) -> Scores:
    """The scores of a model, which are recorded if it is the checkpoint of an experiment and all documents counted."""
    results = evaluate(model, tasks)
    scores = scores_of(results)
    if tasks.is_record and evaluations.record(model.target, scores, results):
        log.info("recorded the scores of %s", model.target)
    return scores


def evaluate_pending(experiment: Path, *, device: str = "auto") -> int:
    """Evaluate every checkpoint that is due, also those that become due meanwhile; the exit code.

    One that fails is not tried again. One that was removed is left out. Raises RequestError for another folder.
    """
    folder, failed = RunFolder(experiment.absolute()), False
    asked = read_run(folder.run_file).config.training
    tasks = TaskRequest(asked.eval_tasks, asked.eval_num_fewshot, asked.eval_limit, is_record=True)
    while waiting := evaluations.pending(folder):
        checkpoint = waiting[0]
        try:
            if not checkpoint.is_dir():
                raise PretrainkitError(f"{checkpoint.name} was removed before it was evaluated")
            log.info("evaluating %s%s", checkpoint.name, f", {len(waiting) - 1} more wait" if waiting[1:] else "")
            scores = evaluate_checkpoint(
                ModelRequest(checkpoint, device=device, batch_size=asked.eval_batch_size), tasks
            )
            log.info("%s:\n%s", checkpoint.name, as_table(scores))
        except PretrainkitError as error:
            log.error("%s", error)
            evaluations.give_up(checkpoint)
            failed = True
    return EXIT_FAILED if failed else EXIT_DONE


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="pretrainkit.evaluation.pending", allow_abbrev=False)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--low_priority", action="store_true")
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM)
    hide_progress_unless_on_a_terminal()
    logs.configure()
    if arguments.low_priority:
        os.nice(LOWEST_PRIORITY)
    try:
        return evaluate_pending(arguments.experiment, device=arguments.device)
    except PretrainkitError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
