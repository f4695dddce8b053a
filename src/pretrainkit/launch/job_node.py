"""One node of a scheduler's job: it meets the others, starts its ranks, and all nodes end with the same code.

The job's scripts (`scripts.py`) start this on every node, in the container if there is one, and say which node it is
and which start of which job in the variables below. All else is known from its arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pretrainkit import files, logs
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError, RequestError
from pretrainkit.jobs import rendezvous
from pretrainkit.jobs.follow import Follower
from pretrainkit.jobs.registry import read_allocation
from pretrainkit.jobs.rendezvous import Head, Meeting, own_address
from pretrainkit.jobs.sge import visible_gpus
from pretrainkit.jobs.slurm import expand_counts
from pretrainkit.launch import agent
from pretrainkit.launch.supervise import NODE_LOG, StopRequests, supervise, write_everything_to
from pretrainkit.machine import count_cpus
from pretrainkit.preflight import node_check
from pretrainkit.run import folder as experiment
from pretrainkit.run.outcome import FILE_NAME as OUTCOME
from pretrainkit.run.outcome import Outcome, read_outcome, write_outcome

NODE_VARIABLE = "PRETRAINKIT_NODE"
"""Number of this node, from 0."""
START_VARIABLE = "PRETRAINKIT_START"
"""Name of this start of the job: job id and time, the same on all nodes, another after a requeue."""
JOB_VARIABLE = "PRETRAINKIT_JOB_ID"
LOG_VARIABLE = "PRETRAINKIT_LOG"
"""The job's log file."""
CONTINUES_VARIABLE = "PRETRAINKIT_CONTINUES"
"""1 in a job that only goes on where a predecessor's time was over."""
JOB_FILE = "job.json"
"""File of an attempt that says which job it belongs to, and at which checkpoint it began."""
MAX_IDLE_JOBS = 3
"""Jobs in a row without a new checkpoint, after which no further one begins: the bound of --restart_limit."""
NODES_FOLDER = "nodes"
"""Folder in the job's, with one folder for each start (`meeting.py`)."""

log = logs.get_logger(__name__)


def run_in_job(arguments: argparse.Namespace, requests: StopRequests) -> int:
    """Run this node's ranks; the exit code is the attempt's, on all nodes. Raises PretrainkitError."""
    environment = os.environ
    node = int(environment.get(NODE_VARIABLE, "0"))
    start = environment.get(START_VARIABLE, f"{os.getpid()}")
    meeting = Meeting(arguments.job_dir / NODES_FOLDER / start, node, arguments.num_nodes)
    _set_defaults(arguments.ranks)
    if not meeting.is_head:
        return _run_other(arguments, requests, meeting)
    try:
        with experiment.locked(arguments.experiment_dir, experiment.RANKS_LOCK):
            return _run_head(arguments, requests, meeting)
    except PretrainkitError as error:
        meeting.report_failure()
        meeting.publish(Head("", 0, "", refused=str(error), exit_code=error.exit_code))
        raise


def _run_head(arguments: argparse.Namespace, requests: StopRequests, meeting: Meeting) -> int:
    if (refusal := _end_of_chain(arguments.experiment_dir)) is not None:
        meeting.publish(refusal)
        log.warning("%s", refusal.refused)
        return refusal.exit_code
    _check_allocation(arguments)
    log_dir = _new_attempt(arguments.experiment_dir, arguments.job_dir)
    hosts = read_allocation(os.environ)
    several = arguments.num_nodes > 1
    store = rendezvous.open_store() if several else None
    address = own_address([hosts.hosts[0]] if hosts else [])
    meeting.publish(Head(address, store.port if store else 0, str(log_dir)))
    log.info("node 0 of %d, attempt in %s", arguments.num_nodes, log_dir)
    where = rendezvous.Rendezvous(store, address, store.port, 0, arguments.num_nodes) if store else None
    if several and address.startswith("127."):
        log.warning("this host's name stands for %s: other machines can't reach it", address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        _report_ready(meeting, arguments)
        meeting.wait_for_all()
        if problem := _check_network(meeting, arguments, where):
            raise PretrainkitError(problem, action="exclude the node from the job, or tell its administrators")
    except PretrainkitError as error:
        meeting.report_failure()
        write_outcome(log_dir, Outcome(EXIT_FAILED, None, str(error)))
        raise
    with _mirrored(log_dir):
        outcome = _run_ranks(arguments, requests, meeting, log_dir, where)
        write_outcome(log_dir, outcome)
    _tell(outcome, log_dir)
    return outcome.exit_code


def _run_other(arguments: argparse.Namespace, requests: StopRequests, meeting: Meeting) -> int:
    head = meeting.wait_for_head()
    if head.refused is not None:
        return head.exit_code
    try:
        store = rendezvous.connect_store(head.address, head.port)
    except Exception as error:  # torch's own kind, which is not public
        _report_ready(meeting, arguments, f"can't reach node 0 at {head.address}:{head.port}: {error}")
        return EXIT_FAILED
    if head.address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = rendezvous.Rendezvous(store, head.address, head.port, meeting.node, arguments.num_nodes)
    _report_ready(meeting, arguments)
    if not meeting.wait_for_go():
        return EXIT_FAILED
    if _check_network(meeting, arguments, where):
        return EXIT_FAILED
    log_dir = Path(head.log_dir)
    write_everything_to(log_dir / f"node_{meeting.node}.log")
    logs.configure()
    return _run_ranks(arguments, requests, meeting, log_dir, where).exit_code


def _report_ready(meeting: Meeting, arguments: argparse.Namespace, problem: str = "") -> None:
    """Say what the preflight finds wrong with this node, or that it may start its ranks."""
    if arguments.check and not problem:
        report = node_check.check_node(_check_request(arguments))
        for line in report.describe().splitlines():
            log.info("%s", line)
        problem = "; ".join(report.problems)
    meeting.report_ready(problem)


def _check_network(meeting: Meeting, arguments: argparse.Namespace, where: rendezvous.Rendezvous | None) -> str:
    """What is wrong with the connections of the nodes, the same text on all; empty when nothing is."""
    if not arguments.check or where is None:
        return ""
    check = node_check.check_connections(
        _check_request(arguments), where.address, where.port, node=where.node, hosts=meeting.hosts
    )
    if meeting.is_head:
        log.info("%s", check.describe())
    return check.found if check.is_failed else ""


def _check_request(arguments: argparse.Namespace) -> node_check.NodeCheckRequest:
    # Ranks on the CPU need no fabric of a machine: that a small all-reduce works is then no news.
    return node_check.NodeCheckRequest(
        ranks=arguments.ranks,
        accelerator=arguments.accelerator,
        output_dir=arguments.experiment_dir,
        collectives=arguments.accelerator == "gpu",
        needed_time_s=arguments.needed_time_s,
    )


def _run_ranks(
    arguments: argparse.Namespace,
    requests: StopRequests,
    meeting: Meeting,
    log_dir: Path,
    where: rendezvous.Rendezvous | None,
) -> Outcome:
    def poll() -> None:
        meeting.beat()
        if requests.asked and not meeting.must_stop:
            meeting.ask_to_stop()
        elif meeting.must_stop and not requests.asked:
            log.warning("the job is to stop: the ranks save and end")
            requests.add()

    outcome = supervise(
        agent.Agent(arguments.ranks, log_dir, arguments.command, where),
        requests,
        poll=poll,
        must_end=lambda: meeting.has_failed,
    )
    is_consequence = meeting.has_failed
    if outcome.exit_code not in (EXIT_DONE, EXIT_STOPPED_AFTER_SAVING):
        meeting.report_failure()
    meeting.report_end(outcome, is_consequence=is_consequence)
    return meeting.agree()


def _end_of_chain(experiment_dir: Path) -> Head | None:
    """Why a job that only continues has nothing to do: its predecessor finished or failed. None: it goes on."""
    if os.environ.get(CONTINUES_VARIABLE) != "1":
        return None
    last = experiment.newest_attempt(experiment_dir)
    if last is None or not (last / OUTCOME).is_file():
        return None  # it was killed, at the end of its time or with its node: go on from its last checkpoint
    outcome = read_outcome(last)
    if outcome.exit_code == EXIT_STOPPED_AFTER_SAVING:
        return _end_of_idle_jobs(experiment_dir)
    if outcome.exit_code == EXIT_DONE:
        return Head("", 0, "", refused=f"the run is done ({last}): this job ends", exit_code=EXIT_DONE)
    return Head(
        "", 0, "", refused=f"the run failed ({last}: {outcome.reason}): this job ends", exit_code=outcome.exit_code
    )


def _end_of_idle_jobs(experiment_dir: Path) -> Head | None:
    """Why jobs that only continue should end: the last ones all began at the checkpoint that is still the newest."""
    begun = [_checkpoint_of(folder) for folder in experiment.attempts(experiment_dir)[-MAX_IDLE_JOBS:]]
    if len(begun) < MAX_IDLE_JOBS or set(begun) != {_newest_checkpoint(experiment_dir)}:
        return None
    return Head(
        "",
        0,
        "",
        refused=f"{MAX_IDLE_JOBS} jobs in a row ended without a new checkpoint: from start to --time_margin before "
        "--time_limit there was no time for a step",
        exit_code=EXIT_FAILED,
    )


def _checkpoint_of(attempt: Path) -> str | None:
    try:
        return str(files.read_json(attempt / JOB_FILE)["checkpoint"])
    except (OSError, ValueError, KeyError):
        return None


def _newest_checkpoint(experiment_dir: Path) -> str:
    """Name of the newest checkpoint's folder, '' before the first; only for telling whether there is a new one."""
    return max((path.name for path in (experiment_dir / experiment.CHECKPOINTS).glob("step_*")), default="")


def _check_allocation(arguments: argparse.Namespace) -> None:
    found = read_allocation(os.environ)
    if found is None:
        return
    if len(found.hosts) != arguments.num_nodes:
        raise RequestError(
            f"the job has {len(found.hosts)} nodes: {', '.join(found.hosts)}",
            needed=f"{arguments.num_nodes}, as the run was resolved for",
            action="let the resource request (resources of the site's file) follow {num_nodes}",
            where="--num_nodes",
        )
    if max(expand_counts(found.tasks)) > 1:
        raise RequestError(
            f"srun started {found.tasks} tasks on the nodes",
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


def _new_attempt(experiment_dir: Path, job_dir: Path) -> Path:
    """The folder of the attempt's logs, with what it runs and the job that it belongs to."""
    _, log_dir = experiment.new_attempt(experiment_dir)
    for source in (experiment_dir / experiment.RUN_FILE, job_dir / "source.txt"):
        if source.is_file():
            shutil.copyfile(source, log_dir / source.name)
    job = {
        "job_id": os.environ.get(JOB_VARIABLE),
        "log": os.environ.get(LOG_VARIABLE),
        "job_dir": str(job_dir),
        "checkpoint": _newest_checkpoint(experiment_dir),
    }
    files.write_json(log_dir / JOB_FILE, job)
    return log_dir


def _set_defaults(ranks: int) -> None:
    """Variables of the ranks that only the node can know; what the user or the site has set wins."""
    # torchrun would set 1: far too few where a rank computes on the CPU.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cpus() // ranks)))
    if "CUDA_VISIBLE_DEVICES" not in os.environ and (gpus := visible_gpus(os.environ)):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus


@contextlib.contextmanager
def _mirrored(log_dir: Path) -> Iterator[None]:
    """Write the node's log to a file of the attempt, and repeat it and rank 0's output in the job's log."""
    job_log = os.fdopen(write_everything_to(log_dir / NODE_LOG), "wb")
    logs.configure()
    followed = [log_dir / name for name in (NODE_LOG, *agent.rank_log_names(0))]
    with job_log:
        with Follower(followed, job_log):
            yield
        os.dup2(job_log.fileno(), sys.stderr.fileno())
    logs.configure()


def _tell(outcome: Outcome, log_dir: Path) -> None:
    if outcome.exit_code == EXIT_DONE:
        log.info("done")
    elif outcome.exit_code == EXIT_STOPPED_AFTER_SAVING:
        log.warning("stopped as asked: a successor, or the same command, continues it")
    else:
        log.error("failed: %s; logs of all ranks in %s", outcome.reason, log_dir)
