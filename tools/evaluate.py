#!/usr/bin/env python
"""Evaluates a checkpoint, or a Hugging Face folder, on tasks of lm-evaluation-harness (the extra `evaluation`).

A checkpoint runs in Megatron-core at the tensor parallel size of its training, without an export. Scores of an
experiment's checkpoint become records of it, which inspect_run.py and the model card show.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.logs import get_logger

log = get_logger("evaluate")


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "target", type=Path, nargs="?", help="checkpoint or Hugging Face folder; with --pending an experiment"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks or groups by name, or YAML files of tasks")
    what.add_argument(
        "--pending",
        action="store_true",
        help="every checkpoint of the experiment that --eval_tasks of its training asks for and that has no scores yet",
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples in front of a question; default: the task's"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first documents of each task only, to try it")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at a time")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a sequence; default: the model's context"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--precision", choices=("auto", "bf16", "fp32"), default="auto", help="auto: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument(
        "-T", "--tensor-model-parallel-size", type=int, metavar="N", help="of a checkpoint; default: as it was trained"
    )
    parser.add_argument("--hf-model", type=Path, help="original Hugging Face folder, if a checkpoint lacks its files")
    parser.add_argument("--ignore-config-fields", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--download", action="store_true", help="only fetch the tasks' data, for machines without a network"
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, record, print."""
    from pretrainkit.evaluation.tasks import hide_progress_unless_on_a_terminal

    hide_progress_unless_on_a_terminal()
    from pretrainkit.evaluation.evaluate import ModelRequest
    from pretrainkit.evaluation.pending import evaluate_checkpoint, evaluate_pending
    from pretrainkit.evaluation.tasks import TaskRequest, as_table, load_tasks

    tasks = TaskRequest(
        tuple(arguments.tasks or ()), arguments.num_fewshot, arguments.limit, is_record=arguments.limit is None
    )
    if arguments.download:
        load_tasks(tasks)
        log.info("the data of %s is in the cache", ", ".join(tasks.tasks))
        return EXIT_DONE
    if arguments.target is None:
        raise RequestError("missing", needed="a checkpoint or a Hugging Face folder", where="TARGET")
    if arguments.pending:
        return evaluate_pending(arguments.target, device=arguments.device)
    model = ModelRequest(
        arguments.target,
        arguments.hf_model,
        arguments.tensor_model_parallel_size,
        arguments.device,
        arguments.precision,
        arguments.batch_size,
        arguments.max_length,
        tuple(arguments.ignore_config_fields),
    )
    scores = evaluate_checkpoint(model, tasks)
    print(json.dumps(scores, indent=2) if arguments.json else as_table(scores))
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
