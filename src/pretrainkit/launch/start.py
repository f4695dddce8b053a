"""From a request to a started run: gather, check, resolve, write, start; --dry_run and --plan stop earlier."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import files
from pretrainkit.config.resolve import resolve
from pretrainkit.config.schema import ResolvedRun, RunConfig
from pretrainkit.config.validate import problems_of
from pretrainkit.config.warnings import warnings_of
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.jobs.container import Container, container_of
from pretrainkit.jobs.run_job import check_environment, needs_of, planned_job, start_job
from pretrainkit.jobs.submit import describe as describe_job
from pretrainkit.jobs.watch import Follower
from pretrainkit.launch.inputs import inspect_inputs
from pretrainkit.launch.local import LaunchPlan, run_local
from pretrainkit.launch.summary import summarize, summarize_estimates
from pretrainkit.launch.supervise import GRACE_S
from pretrainkit.logs import get_logger
from pretrainkit.run import initial_weights
from pretrainkit.run.folder import LAUNCHER_LOCK, SOURCE_FILE, RunFolder, locked, shown_logs, wait_for_ranks
from pretrainkit.run.identity import changes_since_last_start, write_run_file
from pretrainkit.run.outcome import log_outcome
from pretrainkit.run.resource_plan import finalize_run, plan_memory
from pretrainkit.run.resume_plan import plan_start
from pretrainkit.run.source import describe

log = get_logger(__name__)


def resolve_request(config: RunConfig) -> ResolvedRun:
    """The resolved run of a request. Raises RequestError with everything that is wrong with it."""
    facts, problems = inspect_inputs(config)
    problems = [*problems, *problems_of(config, facts)]
    if problems:
        raise RequestError.of_all(problems)
    run = resolve(config, facts)
    for warning in warnings_of(run, facts):
        log.warning("%s", warning)
    return run


def start(config: RunConfig, *, train_script: Path, command_line: Sequence[str], follow: bool = False) -> int:
    """Start the run that is asked for, or continue it; gives the exit code.

    On this machine it waits for the end, and the exit code is that of the ranks. A scheduler's job is submitted, and
    waited for with `follow`. What the ranks would raise for the run and its checkpoints is raised before anything is
    written.
    """
    run = resolve_request(config)
    if config.launch.is_scheduled:
        return start_job(run, train_script=train_script, command_line=command_line, follow=follow)
    folder, container = RunFolder.of(run), _container(run, train_script)
    with locked(folder, LAUNCHER_LOCK):
        wait_for_ranks(folder, longest_s=GRACE_S)
        run = finalize_run(run)
        initial_weights.provide_for(run)
        run_file = write_run_file(run)
        files.write_text(folder.path / SOURCE_FILE, describe(run, command_line))
        log_dir = folder.new_attempt_folder(run_file, folder.path / SOURCE_FILE)
        log.info("experiment %s, logs in %s", config.experiment, log_dir)
        return run_attempt(LaunchPlan(run, run_file, log_dir, train_script.resolve(), container))


def dry_run(config: RunConfig, *, train_script: Path) -> int:
    """Do everything but the conversion and the start: print the run, its file, and the command or scripts."""
    run = resolve_request(config)
    folder = RunFolder.of(run)
    job = planned_job(run, train_script.resolve()) if config.launch.is_scheduled else None
    container = None if job else _container(run, train_script)
    with locked(folder, LAUNCHER_LOCK):
        run = finalize_run(run)
        run_file = write_run_file(run, is_dry=True)
    print(summarize(run))
    print(f"run file   {run_file}")
    if job is not None:
        print(f"\n{describe_job(job)}")
        return EXIT_DONE
    plan = LaunchPlan(run, run_file, folder.attempt("N"), train_script.resolve(), container)
    print(f"command    {shlex.join(plan.node_command)}")
    return EXIT_DONE


def print_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print what a start would do, change and need. The exit code is 0 only when a start would go on to train."""
    run = plan_memory(resolve_request(config), refuse=False)
    plan, changes = plan_start(run), changes_since_last_start(run)
    if as_json:
        found = {"changes": changes, "estimates": run.estimates, "kernels": run.kernels}
        print(json.dumps({**dataclasses.asdict(plan), **found}, indent=2, default=dataclasses.asdict))
    else:
        print(plan.describe())
        print("\n".join(f"changed    {name}: {old} -> {new}" for name, (old, new) in changes.items()) or "changed    -")
        print(summarize_estimates(run))
    finalize_run(run)
    return EXIT_DONE


def _container(run: ResolvedRun, train_script: Path) -> Container | None:
    """The container of a local run. Raises RequestError for what it can't have."""
    check_environment(run.config.launch)
    needs = [train_script.resolve().parents[1], *needs_of(run)]
    return container_of(run.config.launch, needs=needs, on_gpu=run.accelerator == "gpu")


def run_attempt(plan: LaunchPlan) -> int:
    """Run an attempt on this machine to its end, with its output on the terminal."""
    with Follower(shown_logs(plan.log_dir), sys.stderr.buffer):
        outcome = run_local(plan)
    return log_outcome(outcome, plan.log_dir, continued_by="the same command")
