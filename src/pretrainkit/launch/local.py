"""An attempt on this machine: one node process, started through NeMo-Run, which starts the ranks.

NeMo-Run's LocalExecutor can't be stopped: when its process is killed, what it started keeps running. So this module
forwards signals to the node process itself, and ends whatever outlives that.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pretrainkit
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.container import Container
from pretrainkit.jobs.run_job import EVALUATION_MODULE, NODE_MODULE, python_of, rank_environment
from pretrainkit.jobs.secrets import passed_on
from pretrainkit.jobs.watch import Follower
from pretrainkit.launch.evaluations import evaluate_rest, evaluated_meanwhile
from pretrainkit.launch.supervise import GRACE_S, KILL_SIGNAL, GracefulStop, kill_descendants
from pretrainkit.logs import get_logger
from pretrainkit.run.folder import PID_FILE, RunFolder, shown_logs
from pretrainkit.run.live_line import live_line
from pretrainkit.run.outcome import Outcome, log_outcome, read_outcome
from pretrainkit.run.progress import read_attempt
from pretrainkit.signals import STOP_SIGNALS, adopt_orphans

HOME_NAME = ".nemo_run"
"""NeMo-Run's own records, in the experiment's folder instead of the user's home."""
_POLL_S = 0.1
_SECOND_CTRL_C_S = 1.0
"""A Ctrl-C that arrives sooner is the first one again, sent to every process (assumed: people wait longer)."""

log = get_logger(__name__)


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that starting an attempt needs."""

    run: ResolvedRun
    run_file: Path
    log_dir: Path
    train_script: Path
    """The script that every rank runs."""
    container: Container | None = None

    @property
    def rank_command(self) -> list[str]:
        """Command of every rank."""
        return [sys.executable, str(self.train_script), "--run", str(self.run_file)]

    @property
    def node_command(self) -> list[str]:
        """Command that starts the ranks, in the container if there is one; else with this interpreter."""
        config = self.run.config.launch
        command = [
            *(python_of(config, self.container is not None), "-m", NODE_MODULE),
            *("--ranks", str(config.num_gpus)),
            *("--experiment_dir", self.run.experiment_dir),
            *("--log_dir", str(self.log_dir)),
            *(["--choose_kernels"] if self.container else []),
            *("--", *self.rank_command[1:]),
        ]
        return self._contained(command)

    def evaluation_command(self, *options: str) -> list[str]:
        """Command that evaluates the checkpoints that are due."""
        python = python_of(self.run.config.launch, self.container is not None)
        return self._contained([python, "-m", EVALUATION_MODULE, self.run.experiment_dir, *options])

    def _contained(self, command: list[str]) -> list[str]:
        if self.container is None:
            return command
        return ["apptainer", "exec", *self.container.apptainer_options(), self.container.image, *command]


def run_attempt(plan: LaunchPlan) -> int:
    """Run an attempt on this machine to its end, with its output on the terminal; gives its exit code.

    Must run in the main thread. Stop signals are forwarded: after the first the ranks save and end, a second Ctrl-C
    kills them. No process is left when this returns.
    """
    adopt_orphans()
    folder, environment = RunFolder.of(plan.run), dict(os.environ)  # the ranks' own has no hub
    low = plan.evaluation_command("--device", "cpu", "--low_priority")
    meanwhile = evaluated_meanwhile(folder, low, environment | {"CUDA_VISIBLE_DEVICES": ""})
    with (
        live_line(lambda: read_attempt(plan.log_dir), plan.run.max_steps, sys.stderr, metrics=folder.metrics) as stream,
        Follower(shown_logs(plan.log_dir), stream),
    ):
        with _forwarded_signals(plan.log_dir / PID_FILE) as stop:
            with meanwhile if plan.run.config.training.eval_tasks else contextlib.nullcontext():
                _run_experiment(plan)
            _wait_for_orphaned_ranks(plan, stop)
        if left := kill_descendants():
            log.warning("killed processes that were left behind: %s", ", ".join(map(str, left)))
    if stop.requested and not (plan.log_dir / PID_FILE).exists():  # the node process was killed before it listened
        outcome = Outcome(EXIT_STOPPED_AFTER_SAVING, None, "stopped before the ranks were started")
    else:
        outcome = read_outcome(plan.log_dir)
    code = log_outcome(outcome, plan.log_dir, continued_by="the same command")
    if code == EXIT_DONE and plan.run.config.training.eval_tasks:
        evaluate_rest(folder, plan.evaluation_command(), environment)
    return code


def _wait_for_orphaned_ranks(plan: LaunchPlan, stop: GracefulStop) -> None:
    """Let ranks whose node process was killed save and end: the kernel has sent them SIGTERM (`run_rank`)."""
    import psutil

    ranks = []
    for process in psutil.Process().children():  # other processes may never end
        with contextlib.suppress(psutil.Error):
            if str(plan.train_script) in process.cmdline():
                ranks.append(process)
    if ranks:
        log.warning("the process that starts the ranks died: they save and end")
    end_s = time.monotonic() + GRACE_S
    while ranks and not stop.should_kill and time.monotonic() < end_s:
        _, ranks = psutil.wait_procs(ranks, timeout=_POLL_S)


def _run_experiment(plan: LaunchPlan) -> None:
    home = Path(plan.run.experiment_dir) / HOME_NAME
    os.environ["NEMORUN_HOME"] = str(home)  # read when nemo_run is imported
    for name, value in rank_environment(plan.run).items():  # the launcher's own variables win
        os.environ.setdefault(name, value)
    os.environ.update(plan.run.config.launch.environment)  # those of --env and the site win over all others
    if plan.container is not None:
        _export_to_container(plan)
    with heavy_imports("torch"):  # it would be imported for the names of its dtypes
        import nemo_run

    executor = nemo_run.LocalExecutor()
    program, first, *rest = plan.node_command
    # NeMo-Run replaces $names in arguments.
    script = nemo_run.Script(path=first, entrypoint=program, args=[word.replace("$", "$$") for word in rest])
    with nemo_run.Experiment(
        "pretrain",
        executor=executor,
        id=f"pretrain_{plan.log_dir.name}",
        base_dir=str(home),
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    ) as experiment:
        experiment.add(script, name="node")
        experiment.run()


def _export_to_container(plan: LaunchPlan) -> None:
    """Choose the variables that Apptainer lets in: with --cleanenv it lets in no others."""
    plain, secret = passed_on(os.environ)
    ours = (name for name in os.environ if name.startswith("PRETRAINKIT_"))
    asked = {**rank_environment(plan.run), **plan.run.config.launch.environment}
    names = {*plain, *secret, *ours, *asked, "CUDA_VISIBLE_DEVICES"}
    inside = {name: os.environ[name] for name in names if name in os.environ}
    inside |= {"PYTHONNOUSERSITE": "1", "PYTHONPATH": str(Path(pretrainkit.__file__).parents[1])}
    os.environ.update({f"APPTAINERENV_{name}": value for name, value in inside.items()})


@contextlib.contextmanager
def _forwarded_signals(pid_file: Path) -> Iterator[GracefulStop]:
    """Forward the stop signals that this process gets to the attempt's node process, as soon as there is one."""
    stop, first_ctrl_c_s = GracefulStop(), math.inf

    def request(number: int, _: Any) -> None:
        nonlocal first_ctrl_c_s
        if not stop.requested:
            log.warning("stopping: the ranks save and end; a second Ctrl-C kills them")
        stop.request(number)
        if number == signal.SIGINT:
            if time.monotonic() - first_ctrl_c_s >= _SECOND_CTRL_C_S:
                stop.request(KILL_SIGNAL)
            first_ctrl_c_s = min(first_ctrl_c_s, time.monotonic())

    def forward() -> None:
        sent: set[int] = set()
        while not ended.wait(_POLL_S):
            number = KILL_SIGNAL if stop.should_kill else signal.SIGTERM
            if stop.requested and number not in sent and pid_file.exists():
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(pid_file.read_text()), number)
                    sent.add(number)

    ended = threading.Event()
    thread = threading.Thread(target=forward, name="signals", daemon=True)
    previous = {
        number: signal.signal(number, request)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # set by nohup
    }
    thread.start()
    try:
        yield stop
    finally:
        ended.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, handler)
