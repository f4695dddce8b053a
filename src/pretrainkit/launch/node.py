"""Starts the ranks of one node with torchrun's elastic agent, and sees to it that none is left behind.

    python -m pretrainkit.launch.node --ranks 2 --experiment_dir DIR --log_dir DIR -- train.py --run run.json

torchrun itself ends with 1 whatever its ranks ended with, waits 30 s at most for a rank that saves, and lets
ranks live when it is killed. So its agent runs in a thread here, and the main thread
- passes the first SIGTERM on to the ranks once, so that they save and end; at a second one, or when they take
  longer than `GRACE_S`, it kills them;
- takes the death of the launcher for such a signal;
- writes how it ended to outcome.json.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.launch.experiment import RANKS_LOCK, locked
from pretrainkit.launch.outcome import SUCCESS, Outcome, outcome_of, write_outcome
from pretrainkit.launch.processes import adopt_orphans, kill_descendants

PID_FILE = "node.pid"
NODE_LOG = "node.log"
GRACE_S = 1800
"""Longest wait for ranks to save and end after a signal (assumed: a large model on a slow file system)."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""All mean: save and end. Schedulers announce the end of a job by one of the last two."""
_POLL_S = 0.1
_TAIL_LINES = 30

log = logs.get_logger(__name__)


class StopRequests:
    """Counts the signals that ask this process to stop."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s = 0.0

    def add(self, *_: Any) -> None:
        """Note a request; also usable as a signal handler."""
        self.count += 1
        self.first_s = self.first_s or time.monotonic()

    @property
    def is_urgent(self) -> bool:
        """Whether ranks are to be killed: asked for twice, or waited for too long."""
        return self.count > 1 or (self.count == 1 and time.monotonic() - self.first_s > GRACE_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node's ranks to their end; the exit code is the attempt's."""
    requests = StopRequests()
    for number in STOP_SIGNALS:
        signal.signal(number, requests.add)
    adopt_orphans()
    arguments = _build_parser().parse_args(argv)
    _write_everything_to(arguments.log_dir / NODE_LOG)
    logs.configure()
    (arguments.log_dir / PID_FILE).write_text(f"{os.getpid()}\n")
    with locked(arguments.experiment_dir, RANKS_LOCK):
        outcome = _run(arguments, requests)
        write_outcome(arguments.log_dir, outcome)
    return outcome.exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pretrainkit.launch.node", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--experiment_dir", type=Path, required=True)
    parser.add_argument("--log_dir", type=Path, required=True, help="existing folder of this attempt's logs")
    parser.add_argument("command", nargs="+", help="Python script of a rank, and its arguments")
    return parser


def _write_everything_to(path: Path) -> None:
    """Send this process's stdout and stderr, and those of its children, to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def _run(arguments: argparse.Namespace, requests: StopRequests) -> Outcome:
    launcher = os.getppid()
    agent = _Agent(arguments.ranks, arguments.log_dir, arguments.command)
    agent.start()
    told: set[int] = set()
    while agent.is_alive():
        agent.join(_POLL_S)
        if os.getppid() != launcher and not requests.count:
            log.warning("the launcher has died: the ranks are told to save and end")
            requests.add()
        if requests.is_urgent:
            kill_descendants()
        elif requests.count:
            _tell_ranks(told)
    kill_descendants()
    if requests.is_urgent:
        return Outcome(EXIT_FAILED, None, "killed before the ranks had saved")
    if requests.count and agent.outcome.exit_code == EXIT_FAILED:
        return replace(agent.outcome, reason=f"stopped before the ranks had saved: {agent.outcome.reason}")
    return agent.outcome


def _tell_ranks(told: set[int]) -> None:
    """Pass SIGTERM on, once to each rank; not to a rank's own children, which it needs for saving."""
    import psutil

    for rank in psutil.Process().children():
        if rank.pid not in told:
            told.add(rank.pid)
            log.info("process %d is told to save and end", rank.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()


class _Agent(threading.Thread):
    """torchrun's agent. In a thread it installs no signal handlers of its own."""

    def __init__(self, ranks: int, log_dir: Path, command: Sequence[str]) -> None:
        super().__init__(name="torchrun agent", daemon=True)
        self._ranks, self._log_dir, self._command = ranks, log_dir, command
        self.outcome = Outcome(EXIT_FAILED, None, "torchrun's agent ended without a result")

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._ranks,
            run_id=self._log_dir.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port: several runs on one machine don't meet
            local_addr="localhost",
            max_restarts=0,
            logs_specs=_rank_logs(self._log_dir),
        )
        # That there are no signal handlers in a thread is what we want, and no warning.
        elastic_log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        elastic_log.addFilter(lambda record: "register signal handlers" not in record.getMessage())
        # The agent fills in $names in arguments.
        command = [word.replace("$", "$$") for word in self._command]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            self.outcome = self._explain(error.failures)
        except Exception as error:
            log.exception("torchrun's agent failed")
            self.outcome = Outcome(EXIT_FAILED, None, f"torchrun's agent failed: {error}")
        else:
            self.outcome = SUCCESS

    def _explain(self, failures: dict[int, Any]) -> Outcome:
        outcome = outcome_of({rank: failure.exitcode for rank, failure in failures.items()})
        if outcome.exit_code != EXIT_STOPPED_AFTER_SAVING:
            self._show_end_of_log(outcome.failed_rank or 0)
        return outcome

    def _show_end_of_log(self, rank: int) -> None:
        """Repeat the last lines of a rank that failed; rank 0's are on the terminal already."""
        path = self._log_dir / rank_log_names(rank)[1]
        if rank == 0 or not path.is_file():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        log.error("the end of %s:\n%s", path, "\n".join(f"  {line}" for line in lines))


def rank_log_names(rank: int) -> tuple[str, str]:
    """Names of the files with a rank's stdout and stderr in an attempt's folder."""
    return f"rank_{rank}.out", f"rank_{rank}.err"


def _rank_logs(log_dir: Path) -> Any:
    """Where torchrun sends the output of its ranks."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class RankLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            names = {local_rank: rank_log_names(int(env.get("RANK", local_rank))) for local_rank, env in envs.items()}
            return replace(
                super().reify(envs),
                stdouts={local_rank: str(log_dir / out) for local_rank, (out, _) in names.items()},
                stderrs={local_rank: str(log_dir / err) for local_rank, (_, err) in names.items()},
            )

    return RankLogs(log_dir=str(log_dir / "torchrun"), redirects=Std.ALL)


if __name__ == "__main__":
    sys.exit(main())
