"""torchrun's elastic agent, in a thread: it starts a node's ranks and says how they ended."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.jobs.rendezvous import Endpoint
from pretrainkit.run.folder import RUN_FILE, RunFolder
from pretrainkit.run.outcome import SUCCESS, Outcome, outcome_of

_TAIL_LINES = 30

log = logs.get_logger(__name__)


def with_run_file_of_attempt(command: Sequence[str], experiment_dir: Path, log_dir: Path) -> list[str]:
    """The ranks' command with the run.json of the attempt instead of the experiment's.

    Node 0 rewrites both (`choose_on_node`); on a shared disk other nodes may see the old one of the experiment.
    """
    names = {str(RunFolder(experiment_dir).run_file): str(log_dir / RUN_FILE)}
    return [names.get(word, word) for word in command]


class Agent(threading.Thread):
    """torchrun's agent. In a thread it installs no signal handlers."""

    def __init__(self, ranks: int, log_dir: Path, command: Sequence[str], endpoint: Endpoint) -> None:
        super().__init__(name="torchrun agent", daemon=True)
        self._ranks, self._log_dir, self._command, self._endpoint = ranks, log_dir, command, endpoint
        self.outcome = Outcome(EXIT_FAILED, None, "torchrun's agent ended without a result")

    def run(self) -> None:
        """Start the ranks and wait for them; the result is in `outcome`."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        # It warns that a thread can't install signal handlers, which is what we want.
        elastic_log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        elastic_log.addFilter(lambda record: "register signal handlers" not in record.getMessage())
        # The agent replaces $names in arguments.
        command = [word.replace("$", "$$") for word in self._command]
        try:
            elastic_launch(self._config(), sys.executable)(*command)
        except ChildFailedError as error:
            self.outcome = self._explain(error.failures)
        except Exception as error:
            log.exception("torchrun's agent failed")
            self.outcome = Outcome(EXIT_FAILED, None, f"torchrun's agent failed: {error}")
        else:
            self.outcome = SUCCESS

    def _config(self) -> Any:
        from torch.distributed.launcher.api import LaunchConfig

        endpoint = self._endpoint
        return LaunchConfig(
            min_nodes=endpoint.num_nodes,
            max_nodes=endpoint.num_nodes,
            nproc_per_node=self._ranks,
            run_id=self._log_dir.name,
            max_restarts=0,
            logs_specs=_rank_logs(self._log_dir),
            # The order of nodes is the scheduler's, and the ranks use the store that is open already.
            rdzv_backend="static",
            rdzv_endpoint=f"{endpoint.address}:{endpoint.port}",
            rdzv_configs={"rank": endpoint.node},
            local_addr=endpoint.address,
        )

    def _explain(self, failures: dict[int, Any]) -> Outcome:
        outcome = outcome_of({rank: failure.exitcode for rank, failure in failures.items()})
        if outcome.exit_code != EXIT_STOPPED_AFTER_SAVING:
            self._show_end_of_log(outcome.failed_rank or 0)
        return outcome

    def _show_end_of_log(self, rank: int) -> None:
        """Log the last lines of a rank that failed; rank 0's output is on the terminal already."""
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
