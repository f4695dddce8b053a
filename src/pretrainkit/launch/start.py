"""From a request to a started run: gather, check, resolve, write, start."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrainkit import files
from pretrainkit.config.resolve import resolve
from pretrainkit.config.schema import ResolvedRun, RunConfig
from pretrainkit.config.validate import problems_of
from pretrainkit.config.warnings import warnings_of
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING, RequestError
from pretrainkit.jobs.container import Container, container_of
from pretrainkit.jobs.follow import Follower
from pretrainkit.jobs.run_job import check_environment, needs_of
from pretrainkit.jobs.start_job import as_read, planned_job, provide_weights, start_job
from pretrainkit.jobs.submit import describe as describe_job
from pretrainkit.launch.agent import rank_log_names
from pretrainkit.launch.inputs import gather
from pretrainkit.launch.plan import LaunchPlan, plan_launch
from pretrainkit.launch.summary import summarize
from pretrainkit.launch.supervise import GRACE_S, NODE_LOG
from pretrainkit.logs import get_logger, masked
from pretrainkit.machine import count_cpus
from pretrainkit.run.folder import LAUNCHER_LOCK, RUN_FILE, locked, new_attempt, wait_for_ranks, write_run_file
from pretrainkit.run.source import describe

log = get_logger(__name__)


def resolve_request(config: RunConfig) -> ResolvedRun:
    """The resolved run of a request. Raises RequestError that tells everything that is wrong with it."""
    facts, problems = gather(config)
    problems = [*problems, *problems_of(config, facts)]
    if problems:
        raise RequestError.of_all(problems)
    run = resolve(config, facts)
    for warning in warnings_of(run, facts):
        log.warning("%s", warning)
    return run


def start(
    config: RunConfig,
    *,
    train_script: Path,
    command_line: Sequence[str],
    check: Callable[[ResolvedRun], ResolvedRun],
    follow: bool = False,
) -> int:
    """Start the run that is asked for, or continue it.

    On this machine it waits for the end, and the exit code is that of the ranks. A scheduler's job is submitted, and
    waited for where `follow` asks for it. `check` looks at the run and its checkpoints before anything is written,
    raises what its ranks would raise, and gives the run as it will start.
    """
    run = resolve_request(config)
    experiment_dir = Path(run.experiment_dir)
    if config.launch.is_scheduled:
        return start_job(run, train_script=train_script, command_line=command_line, check=check, follow=follow)
    container = _container(run, train_script)
    with locked(experiment_dir, LAUNCHER_LOCK):
        wait_for_ranks(experiment_dir, longest_s=GRACE_S)
        run = check(run)
        provide_weights(run)
        run_file = write_run_file(run)
        number, log_dir = new_attempt(experiment_dir)
        source = describe(run, command_line)
        for folder in (experiment_dir, log_dir):
            files.write_text(folder / "source.txt", source)
        files.write_text(log_dir / RUN_FILE, run_file.read_text(encoding="utf-8"))
        plan = _plan(run, run_file, log_dir, train_script, container)
        log.info("experiment %s, attempt %d, logs in %s", config.experiment, number, log_dir)
        return _follow(plan)


def dry_run(config: RunConfig, *, train_script: Path, check: Callable[[ResolvedRun], ResolvedRun]) -> int:
    """Do all of a start but the conversion and the start: print the run, its file, and the command or scripts."""
    run = resolve_request(config)
    experiment_dir = Path(run.experiment_dir)
    is_scheduled = config.launch.is_scheduled
    job = planned_job(run, train_script) if is_scheduled else None
    container = None if is_scheduled else _container(run, train_script)
    with locked(experiment_dir, LAUNCHER_LOCK):
        run = check(run)
        run_file = write_run_file(run, is_dry=True)
    print(summarize(run))
    print(f"run file   {run_file}")
    if job is not None:
        print(f"\n{describe_job(job)}")
        return EXIT_DONE
    plan = _plan(run, run_file, experiment_dir / "logs" / "attempt_N", train_script, container)
    print(f"command    {shlex.join(plan.node_command)}")
    return EXIT_DONE


def _container(run: ResolvedRun, train_script: Path) -> Container | None:
    """The container of a local run. Raises RequestError for what it can't have."""
    check_environment(run.config.launch)
    needs = [train_script.resolve().parents[1], *needs_of(as_read(run))]
    return container_of(run.config.launch, needs=needs, on_gpu=run.accelerator == "gpu")


def _plan(
    run: ResolvedRun, run_file: Path, log_dir: Path, train_script: Path, container: Container | None
) -> LaunchPlan:
    return plan_launch(
        run,
        run_file=run_file,
        log_dir=log_dir,
        train_script=train_script.resolve(),
        num_cpus=count_cpus(),
        container=container,
    )


def _follow(plan: LaunchPlan) -> int:
    from pretrainkit.launch.local import run_local

    followed = [plan.log_dir / name for name in (NODE_LOG, *rank_log_names(0))]
    with Follower(followed, sys.stderr.buffer):
        outcome = run_local(plan)
    if outcome.exit_code == EXIT_DONE:
        log.info("done: %s", plan.experiment_dir)
    elif outcome.exit_code == EXIT_STOPPED_AFTER_SAVING:
        log.warning("stopped as asked; the same command continues it")
    else:
        log.error("failed: %s; logs of all ranks in %s", masked(outcome.reason), plan.log_dir)
    return outcome.exit_code
