"""Tasks of lm-evaluation-harness (package lm_eval, the extra `evaluation`), run on a model that it can ask."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.errors import PretrainkitError, RequestError, one_line
from pretrainkit.imports import heavy_imports
from pretrainkit.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lm_eval.api.model import LM

Scores = dict[str, dict[str, float]]
"""Value by metric by task. A metric of a filter other than `none` has the filter's name behind a comma."""
_BOOTSTRAP = 1000
"""Resamples for the standard errors of metrics that aren't means."""

log = get_logger(__name__)


@dataclass(frozen=True)
class TaskRequest:
    """What to ask a model."""

    tasks: tuple[str, ...]
    """Names of tasks or groups, or YAML files of tasks."""
    num_fewshot: int | None = None
    """None: as each task says."""
    limit: int | None = None
    """Documents of each task; None: all."""
    is_record: bool = True
    """Whether the scores are kept as those of the model."""


def hide_progress_unless_on_a_terminal() -> None:
    """Call it before tqdm and datasets are imported, which read it then."""
    if not sys.stderr.isatty():
        os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def check_installed() -> None:
    """Raise RequestError unless lm_eval is there."""
    if importlib.util.find_spec("lm_eval") is None:
        raise RequestError(
            "lm-evaluation-harness is not installed",
            action="make evaluation, or pip install lm_eval in an environment of your own",
            where="--tasks",
        )


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise RequestError unless lm_eval is there, and every file that is named; names of tasks aren't looked up."""
    check_installed()
    for task in tasks:
        if _is_file(task) and not Path(task).is_file():
            raise RequestError(
                f"no file {task}", needed="a task of lm-evaluation-harness or a YAML file", where="--tasks"
            )


def load_tasks(request: TaskRequest) -> Any:
    """The tasks with their data, which the datasets package takes from files, its cache or the hub.

    Raises RequestError for an unknown task, and when its data can't be had.
    """
    check_tasks(request.tasks)
    with heavy_imports(), quiet():
        from lm_eval.tasks import TaskManager
    with quiet():
        # Its own tasks are thousands of files, which take ten seconds to list.
        manager = TaskManager(include_defaults=not all(map(_is_file, request.tasks)))
    found: dict[str, dict[str, Any]] = {}
    for task in request.tasks:
        try:
            with quiet():
                loaded = manager.load([_of_file(Path(task)) if _is_file(task) else task])
        except KeyError:
            raise RequestError(
                f"no task {task}",
                needed="a task of lm-evaluation-harness (lm-eval ls tasks) or a YAML file",
                where="--tasks",
            ) from None
        except Exception as error:  # of the datasets package, the hub's client or the task's own code
            raise RequestError(
                f"task {task} can't be loaded: {one_line(error)}",
                action="without a network its data must be in the cache: evaluate.py --download --tasks ... fetches "
                "it, with the same HF_HOME",
                where="--tasks",
            ) from error
        for kind, items in loaded.items():
            found.setdefault(kind, {}).update(items)
    return found


def check_loading(tasks: Sequence[str]) -> None:
    """Load tasks, for their errors and for the data that is in the cache then."""
    hide_progress_unless_on_a_terminal()
    load_tasks(TaskRequest(tuple(tasks)))


def run_tasks(model: LM, request: TaskRequest, loaded: Any) -> dict[str, Any]:
    """The results of the tasks that `load_tasks` gave, as lm_eval gives them."""
    if not sys.stderr.isatty():
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, name, partial(getattr(model, name), disable_tqdm=True))
    with quiet():
        from lm_eval import simple_evaluate

        done = simple_evaluate(
            model=model,
            tasks=[*loaded["groups"].values(), *_alone(loaded)],
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=False,
        )
    return dict(done or {})


def scores_of(results: dict[str, Any]) -> Scores:
    """The metrics of lm_eval's results, without their standard errors."""
    found: Scores = {}
    for task, metrics in results["results"].items():
        values = {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if "," in name and "_stderr," not in name and isinstance(value, int | float)
        }
        if values:
            found[task] = values
    if not found:
        raise PretrainkitError("the tasks gave no scores", where="--tasks")
    return found


def as_table(scores: Scores) -> str:
    """Scores for people: aligned lines."""
    rows = [(task, metric, f"{value:.4f}") for task, metrics in scores.items() for metric, value in metrics.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _alone(loaded: Any) -> list[Any]:
    """The tasks that aren't part of a loaded group."""
    inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
    return [task for name, task in loaded["tasks"].items() if name not in inside]


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _of_file(path: Path) -> dict[str, Any]:
    """The config of a task in a file; relative paths of its data are below the file's folder."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(path)
    options = config.get("dataset_kwargs") or {}
    if files := options.get("data_files"):
        config["dataset_kwargs"] = {**options, "data_files": _absolute(files, path.absolute().parent)}
    return config


def _absolute(files: Any, folder: Path) -> Any:
    if isinstance(files, dict):
        return {name: _absolute(each, folder) for name, each in files.items()}
    if isinstance(files, list):
        return [_absolute(each, folder) for each in files]
    return files if "://" in files else str(folder / files)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of lm_eval and datasets about every default."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
