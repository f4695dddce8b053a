"""Starts a node's ranks as torchrun does, forwards stop requests to them, and leaves no process behind.

The torchrun command ends with 1 whatever its ranks ended with, waits at most 30 s for a rank that saves, and leaves
ranks running when it is killed. So the ranks are started by torchrun's own function here, and
- the first stop signal is forwarded to the ranks once, so that they save and end; at SIGQUIT, or when they take longer
  than `GRACE_S`, they are killed;
- the death of the launcher is a stop signal.

When a rank fails, torchrun's function ends the others: SIGTERM, and SIGKILL 30 s later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.jobs.rendezvous import Endpoint
from pretrainkit.launch.hang_watch import HangWatch
from pretrainkit.run.folder import RUN_FILE, rank_log_names
from pretrainkit.run.outcome import SUCCESS, Outcome, outcome_of, with_cause
from pretrainkit.run.progress import FOLDER_VARIABLE
from pretrainkit.signals import STOP_SIGNALS

GRACE_S = 1800
"""Longest wait for ranks to save and end after a signal (assumed: a large model on a slow file system)."""
KILL_SIGNAL = signal.SIGQUIT
"""Kills the ranks, whether they have saved or not."""
_POLL_S = 0.1
_TAIL_LINES = 30
_KILL_WAIT_S = 10

log = logs.get_logger(__name__)


class GracefulStop:
    """The stop signals that this process has received.

    One request arrives several times: schedulers, cgroups and `timeout` signal every process, and each forwards it. So
    repeating it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_s = 0.0
        self._kill_requested = False

    def request(self, number: int = signal.SIGTERM, _: Any = None) -> None:
        """Note a request; also usable as a signal handler."""
        self._first_s = self._first_s or time.monotonic()
        self.requested = True
        self._kill_requested |= number == KILL_SIGNAL

    @property
    def should_kill(self) -> bool:
        """Whether to kill the ranks: on request, or because they have taken too long to save."""
        return self._kill_requested or (self.requested and time.monotonic() - self._first_s > GRACE_S)


def supervise(
    command: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    endpoint: Endpoint,
    stop: GracefulStop,
    *,
    poll: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Start this node's ranks and wait for their end, forwarding stop requests; how they ended.

    Args:
        command: Python script of a rank, and its arguments. The run.json of the experiment becomes the attempt's: node
            0 rewrites both (`choose_on_node`), and on a shared disk other nodes may see the old one of the experiment.
        num_ranks: ranks of this node; those of node K are numbered from K x `num_ranks`.
        poll: called some times a second; may request a stop, and says whether to kill the ranks because another node
            has failed.
    """
    run_file = str(log_dir.parents[1] / RUN_FILE)
    words = [str(log_dir / RUN_FILE) if word == run_file else word for word in command]
    launcher, first_rank = os.getppid(), endpoint.node * num_ranks
    log.info("starting %d rank%s", num_ranks, "" if num_ranks == 1 else "s")
    records = Path(tempfile.mkdtemp(prefix="pretrainkit-progress-"))
    try:
        ranks = _start(words, num_ranks, log_dir, endpoint, records)
    except Exception as error:
        log.exception("the ranks could not be started")
        kill_descendants()  # those that were
        shutil.rmtree(records, ignore_errors=True)
        return Outcome(EXIT_FAILED, None, f"the ranks could not be started: {error}")
    is_signalled, hang = False, ""
    watch = HangWatch(log_dir, records, endpoint, num_ranks)
    while (result := ranks.wait(timeout=0)) is None:
        time.sleep(_POLL_S)
        has_other_failed, hang = poll(), watch.poll()
        if os.getppid() != launcher and not stop.requested:
            log.warning("the launcher has died: sending SIGTERM to the ranks")
            stop.request()
        if stop.should_kill or has_other_failed or hang:
            break
        if stop.requested and not is_signalled:
            is_signalled = True
            for rank in ranks.subprocess_handlers.values():  # not to their own children, which they need for saving
                log.info("sending SIGTERM to rank process %d (save and exit)", rank.proc.pid)
                rank.proc.terminate()
    kill_descendants()
    shutil.rmtree(records, ignore_errors=True)
    if hang:
        return Outcome(EXIT_FAILED, None, f"hung for longer than --hang_timeout: {hang}", has_hung=True)
    if result is None:
        reason = "killed before the ranks had saved" if stop.should_kill else "ended because another node had failed"
        return Outcome(EXIT_FAILED, None, reason)
    if not result.failures:
        return SUCCESS
    outcome = outcome_of({first_rank + rank: failure.exitcode for rank, failure in result.failures.items()})
    if outcome.exit_code != EXIT_STOPPED_AFTER_SAVING:
        outcome = with_cause(outcome, log_dir)
        _show_end_of_log(log_dir, outcome.failed_rank or 0)
    if stop.requested and outcome.exit_code == EXIT_FAILED:
        return replace(outcome, reason=f"stopped before the ranks had saved: {outcome.reason}")
    return outcome


def _start(command: Sequence[str], num_ranks: int, log_dir: Path, endpoint: Endpoint, records: Path) -> Any:
    """torchrun's context of the processes of this node's ranks, with the variables that torchrun gives them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, start_processes

    # Its words for an orderly stop are those for a failure; what happened is said by the outcome.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    class RankLogs(DefaultLogsSpecs):
        """The output of rank K goes to rank_K.out and rank_K.err."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            names = {local_rank: rank_log_names(int(env["RANK"])) for local_rank, env in envs.items()}
            return replace(
                super().reify(envs),
                stdouts={local_rank: str(log_dir / out) for local_rank, (out, _) in names.items()},
                stderrs={local_rank: str(log_dir / err) for local_rank, (_, err) in names.items()},
            )

    shared = {
        "WORLD_SIZE": endpoint.num_nodes * num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": endpoint.node,
        "GROUP_WORLD_SIZE": endpoint.num_nodes,
        "MASTER_ADDR": endpoint.address,
        "MASTER_PORT": endpoint.port,
        FOLDER_VARIABLE: records,
        "TORCHELASTIC_RUN_ID": log_dir.name,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store that is open already
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    envs = [{**shared, "LOCAL_RANK": rank, "RANK": endpoint.node * num_ranks + rank} for rank in range(num_ranks)]
    # The ranks inherit the mask: a signal stays pending until they listen, and kills none. torch sets handlers.
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, KILL_SIGNAL)}
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(num_ranks), tuple(command)),
            envs={rank: {name: str(value) for name, value in env.items()} for rank, env in enumerate(envs)},
            logs_specs=RankLogs(log_dir=str(log_dir / "torchrun"), redirects=Std.ALL),
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _show_end_of_log(log_dir: Path, rank: int) -> None:
    """Log the last lines of a rank that failed; rank 0's output is on the terminal already."""
    path = log_dir / rank_log_names(rank)[1]
    if rank and path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        log.error("the end of %s:\n%s", path, "\n".join(f"  {line}" for line in lines))


def redirect_output(path: Path) -> int:
    """Send this process's stdout and stderr, and those of its children, to a file; returns the former stderr."""
    former = os.dup(sys.stderr.fileno())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
    return former


def kill_descendants() -> list[int]:
    """Kill every descendant of this process and wait for their end; returns the ids of those that were alive."""
    import psutil

    killed = []
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed.append(process.pid)
    psutil.wait_procs(descendants, timeout=_KILL_WAIT_S)
    return killed
