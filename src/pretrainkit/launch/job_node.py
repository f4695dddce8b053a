"""One node of a scheduler's job: it finds the other nodes, starts its ranks, and all nodes end with one exit code.

The job's scripts (`jobs/scripts.py`) start this on every node, in the container if there is one. The variables below
say which node it is, and which start of which job; its arguments say the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pretrainkit import files, logs
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError, RequestError
from pretrainkit.jobs import rendezvous
from pretrainkit.jobs.registry import read_allocation
from pretrainkit.jobs.rendezvous import BAD_NODE_ACTION, FAILED, HUNG, STOP, Endpoint, HeadInfo, Rendezvous, own_address
from pretrainkit.jobs.sge import visible_gpus
from pretrainkit.jobs.watch import Follower
from pretrainkit.launch.supervise import GracefulStop, redirect_output, supervise
from pretrainkit.preflight.collectives import check_world
from pretrainkit.preflight.node import NodeCheckRequest, check_node
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import (
    JOB_FILE,
    NODE_LOG,
    OUTCOME_FILE,
    RANKS_LOCK,
    SOURCE_FILE,
    RunFolder,
    locked,
    shown_logs,
)
from pretrainkit.run.outcome import Outcome, log_outcome, read_outcome, reserve_outcome, write_outcome
from pretrainkit.run.resource_plan import choose_on_node

NODE_VARIABLE = "PRETRAINKIT_NODE"
"""Number of this node, from 0."""
START_VARIABLE = "PRETRAINKIT_START"
"""Name of this start of the job: job id and time, the same on all nodes, another after a requeue."""
JOB_VARIABLE = "PRETRAINKIT_JOB_ID"
LOG_VARIABLE = "PRETRAINKIT_LOG"
"""The job's log file."""
CONTINUES_VARIABLE = "PRETRAINKIT_CONTINUES"
"""1 in a job that only continues a run that ran out of time."""
MAX_IDLE_JOBS = 3
"""Jobs in a row without a new checkpoint before a chain ends: the bound of --restart_limit."""
NODES_FOLDER = "nodes"
"""Folder in the job's folder, with one folder for each start (`jobs/rendezvous.py`)."""

log = logs.get_logger(__name__)


def run_in_job(arguments: argparse.Namespace, stop: GracefulStop) -> int:
    """Run this node's ranks; the exit code is the attempt's, on all nodes. Raises PretrainkitError."""
    node = int(os.environ.get(NODE_VARIABLE, "0"))
    start = os.environ.get(START_VARIABLE, f"{os.getpid()}")
    nodes = Rendezvous(arguments.job_dir / NODES_FOLDER / start, node, arguments.num_nodes)
    if gpus := visible_gpus(os.environ):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", gpus)
    if not nodes.is_head:
        return _run_other(arguments, stop, nodes)
    try:
        with locked(RunFolder(arguments.experiment_dir), RANKS_LOCK):
            return _run_head(arguments, stop, nodes)
    except PretrainkitError as error:
        nodes.mark(FAILED)
        nodes.publish(HeadInfo(refused=str(error), exit_code=error.exit_code))
        raise


def _run_head(arguments: argparse.Namespace, stop: GracefulStop, nodes: Rendezvous) -> int:
    folder = RunFolder(arguments.experiment_dir)
    if refusal := end_of_chain(folder):
        nodes.publish(refusal)
        log.warning("%s", refusal.refused)
        return refusal.exit_code
    hosts = _check_allocation(arguments)
    log_dir = new_attempt(folder, arguments.job_dir)
    reserve_outcome(log_dir)
    try:
        if str(folder.run_file) in arguments.command:
            choose_on_node(folder.run_file, log_dir)  # before other nodes hear of the attempt
        store = rendezvous.open_store()  # open until all ranks have ended
        address = own_address(list(hosts[:1])) if arguments.num_nodes > 1 else "localhost"
        endpoint = Endpoint(address, store.port, 0, arguments.num_nodes)
        nodes.publish(HeadInfo(endpoint.address, endpoint.port, str(log_dir)))
        log.info("node 0 of %d, attempt in %s", arguments.num_nodes, log_dir)
        _use_loopback(endpoint)
        _report_ready(nodes, arguments)
        nodes.wait_until_all_ready()
        if problem := _check_network(nodes, arguments, endpoint):
            raise PretrainkitError(problem, action=BAD_NODE_ACTION)
    except PretrainkitError as error:
        write_outcome(log_dir, Outcome(error.exit_code, None, str(error)))
        raise
    with _mirrored(log_dir):
        outcome = _run_ranks(arguments, stop, nodes, log_dir, endpoint)
        write_outcome(log_dir, outcome)
    return log_outcome(outcome, log_dir, continued_by="a successor or the same command")


def _run_other(arguments: argparse.Namespace, stop: GracefulStop, nodes: Rendezvous) -> int:
    head = nodes.wait_for_head()
    if head.refused is not None:
        return head.exit_code
    try:
        rendezvous.connect_store(head.address, head.port)
    except Exception as error:  # torch's own class, which is not public
        nodes.report_ready(f"can't reach node 0 at {head.address}:{head.port}: {error}")
        return EXIT_FAILED
    endpoint = Endpoint(head.address, head.port, nodes.node, arguments.num_nodes)
    _use_loopback(endpoint)
    _report_ready(nodes, arguments)
    if not nodes.wait_for_go() or _check_network(nodes, arguments, endpoint):
        return EXIT_FAILED
    log_dir = Path(head.log_dir)
    redirect_output(log_dir / f"node_{nodes.node}.log")
    logs.configure()
    return _run_ranks(arguments, stop, nodes, log_dir, endpoint).exit_code


def _use_loopback(endpoint: Endpoint) -> None:
    """gloo looks up the host's name otherwise, which fails where the nodes are one machine that doesn't know it."""
    if endpoint.num_nodes > 1 and endpoint.address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if endpoint.node == 0:
            log.warning("this host's name resolves to %s: other machines can't reach it", endpoint.address)


def _report_ready(nodes: Rendezvous, arguments: argparse.Namespace) -> None:
    """Report that this node may start its ranks, or what the preflight has found."""
    problems: list[str] = []
    if arguments.check:
        report = check_node(_check_request(arguments))
        for line in report.describe().splitlines():
            log.info("%s", line)
        problems = report.problems
    nodes.report_ready("; ".join(problems))


def _check_network(nodes: Rendezvous, arguments: argparse.Namespace, endpoint: Endpoint) -> str:
    """What is wrong with the connections of the nodes, the same text on all; empty when nothing is."""
    if not arguments.check or endpoint.num_nodes == 1:
        return ""
    check = check_world(_check_request(arguments), nodes, endpoint.address, endpoint.port, hosts=nodes.hosts)
    if nodes.is_head:
        log.info("%s", check.describe())
    return check.found if check.is_failed else ""


def _check_request(arguments: argparse.Namespace) -> NodeCheckRequest:
    # An all-reduce of ranks on the CPU would prove nothing about the machine.
    return NodeCheckRequest(
        ranks=arguments.ranks,
        accelerator=arguments.accelerator,
        output_dir=arguments.experiment_dir,
        collectives=arguments.accelerator == "gpu",
        needed_time_s=arguments.needed_time_s,
    )


def _run_ranks(
    arguments: argparse.Namespace, stop: GracefulStop, nodes: Rendezvous, log_dir: Path, endpoint: Endpoint
) -> Outcome:
    def poll() -> bool:
        nodes.heartbeat()
        if stop.requested and not nodes.has(STOP):
            nodes.mark(STOP)
        elif nodes.has(STOP) and not stop.requested:
            log.warning("stop requested: sending SIGTERM to the ranks (save and exit)")
            stop.request()
        return nodes.should_abort

    outcome = supervise(arguments.command, arguments.ranks, log_dir, endpoint, stop, poll=poll)
    is_consequence = nodes.should_abort
    if outcome.exit_code not in (EXIT_DONE, EXIT_STOPPED_AFTER_SAVING):
        nodes.mark(FAILED)
    if outcome.has_hung:
        nodes.mark(HUNG)
    return nodes.agree_on_outcome(outcome, is_consequence=is_consequence)


def _check_allocation(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Hosts of the job, where the scheduler says them. Raises RequestError unless they are those of the request."""
    found = read_allocation(os.environ)
    if found is None:
        return ()
    if len(found.hosts) != arguments.num_nodes:
        raise RequestError(
            f"the job has {len(found.hosts)} nodes: {', '.join(found.hosts)}",
            needed=f"{arguments.num_nodes}, as the run was resolved for",
            action="use {num_nodes} in the resource request (resources of the site's file)",
            where="--num_nodes",
        )
    if found.tasks_per_node > 1:
        raise RequestError(
            f"srun started {found.tasks_per_node} tasks on a node",
            needed="one on each: it starts the node's ranks itself",
            where="--ntasks-per-node",
        )
    needed = arguments.ranks * (arguments.slots_per_gpu or 0)
    short = [f"{host} has {slots}" for host, slots in zip(found.hosts, found.slots, strict=False) if slots < needed]
    if short:
        raise RequestError(
            f"too few slots: {'; '.join(short)}",
            needed=f"{needed} on each node: {arguments.slots_per_gpu} for each of {arguments.ranks} GPUs",
            where="slots_per_gpu",
        )
    return found.hosts


@contextlib.contextmanager
def _mirrored(log_dir: Path) -> Iterator[None]:
    """Write the node's log to a file of the attempt, and repeat it and rank 0's output in the job's log."""
    job_log = os.fdopen(redirect_output(log_dir / NODE_LOG), "wb")
    logs.configure()
    with job_log:
        with Follower(shown_logs(log_dir), job_log):
            yield
        os.dup2(job_log.fileno(), sys.stderr.fileno())
    logs.configure()


def end_of_chain(folder: RunFolder) -> HeadInfo | None:
    """Why a job that only continues has nothing to do: its predecessor finished or failed. None: it continues."""
    attempts = folder.attempt_folders()
    last = attempts[-1] if attempts else None
    if os.environ.get(CONTINUES_VARIABLE) != "1" or last is None or not (last / OUTCOME_FILE).is_file():
        return None  # without an outcome the predecessor was killed: continue from its last checkpoint
    outcome = read_outcome(last)
    if outcome.exit_code == EXIT_DONE:
        return HeadInfo(refused=f"the run is done ({last}): this job ends")
    if outcome.has_hung:
        return None  # --restart_limit bounds it
    if outcome.exit_code != EXIT_STOPPED_AFTER_SAVING:
        return HeadInfo(
            refused=f"the run failed ({last}: {outcome.reason}): this job ends", exit_code=outcome.exit_code
        )
    starts = [files.read_object(attempt / JOB_FILE).get("checkpoint") for attempt in attempts[-MAX_IDLE_JOBS:]]
    if len(starts) < MAX_IDLE_JOBS or set(starts) != {_newest_checkpoint(folder)}:
        return None
    return HeadInfo(
        refused=f"{MAX_IDLE_JOBS} jobs in a row ended without a new checkpoint: from start to --time_margin before "
        "--time_limit there was no time for a step",
        exit_code=EXIT_FAILED,
    )


def _newest_checkpoint(folder: RunFolder) -> str:
    """Name of the newest checkpoint's folder, '' before the first."""
    newest = newest_committed(folder.checkpoints)
    return newest.name if newest else ""


def new_attempt(folder: RunFolder, job_dir: Path) -> Path:
    """The folder of the attempt's logs, with run.json, source.txt and the job that it belongs to."""
    log_dir = folder.new_attempt_folder(folder.run_file, job_dir / SOURCE_FILE)
    job = {
        "job_id": os.environ.get(JOB_VARIABLE),
        "log": os.environ.get(LOG_VARIABLE),
        "job_dir": str(job_dir),
        "checkpoint": _newest_checkpoint(folder),
    }
    files.write_json(log_dir / JOB_FILE, job)
    return log_dir
