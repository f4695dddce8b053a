"""Starts a plan on this machine through NeMo-Run.

NeMo-Run's LocalExecutor can't be told to stop: when its process is killed, what it started runs on. So this
module passes signals to the node process itself, and takes over and ends whatever outlives it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrainkit
from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.secrets import passed_on
from pretrainkit.launch.plan import LaunchPlan
from pretrainkit.launch.processes import adopt_orphans, kill_descendants
from pretrainkit.launch.supervise import GRACE_S, KILL_SIGNAL, PID_FILE, StopRequests
from pretrainkit.logs import get_logger
from pretrainkit.run.outcome import Outcome, read_outcome
from pretrainkit.signals import STOP_SIGNALS

HOME_NAME = ".nemo_run"
"""NeMo-Run's own records, in the experiment's folder instead of the user's home."""
_DELIVERY_INTERVAL_S = 0.1
_SECOND_CTRL_C_S = 1.0
"""What comes sooner after a Ctrl-C is the same one, sent to every process (assumed: people wait longer)."""

log = get_logger(__name__)


def run_local(plan: LaunchPlan) -> Outcome:
    """Start an attempt on this machine, wait for its end, and say how it ended. Must run in the main thread.

    Signals that ask to stop are passed on: after the first the ranks save and end, after a second Ctrl-C they are
    killed. Nothing that was started is left when this returns.
    """
    adopt_orphans()
    with _forwarded_signals(plan.log_dir) as requests:
        _run_experiment(plan)
        _wait_for_orphans(plan, requests)
    if left := kill_descendants():
        log.warning("processes that were left behind are killed: %s", ", ".join(map(str, left)))
    if requests.asked and not (plan.log_dir / PID_FILE).exists():  # so was its node process, which didn't listen yet
        return Outcome(EXIT_STOPPED_AFTER_SAVING, None, "stopped before the ranks were started")
    return read_outcome(plan.log_dir)


def _wait_for_orphans(plan: LaunchPlan, requests: StopRequests) -> None:
    """Let ranks whose node process was killed save and end: the system has told them (`train.py`)."""
    import psutil

    ranks = []
    for process in psutil.Process().children():  # others that they have left may never end
        with contextlib.suppress(psutil.Error):
            if str(plan.train_script) in process.cmdline():
                ranks.append(process)
    if ranks:
        log.warning("the process that starts the ranks died: they save and end")
    end_s = time.monotonic() + GRACE_S
    while ranks and not requests.is_urgent and time.monotonic() < end_s:
        _, ranks = psutil.wait_procs(ranks, timeout=_DELIVERY_INTERVAL_S)


def _run_experiment(plan: LaunchPlan) -> None:
    home = plan.experiment_dir / HOME_NAME
    os.environ["NEMORUN_HOME"] = str(home)  # read when nemo_run is imported
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(plan.asked_environment)
    if plan.container is not None:
        _export_to_container(plan)
    with heavy_imports():
        import nemo_run

    executor = nemo_run.LocalExecutor()
    program, first, *rest = plan.node_command
    script = nemo_run.Script(path=first, entrypoint=program, args=[_literal(word) for word in rest])
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
    """Say what of this process's environment Apptainer lets in: with --cleanenv nothing comes by itself."""
    plain, secret = passed_on(os.environ)
    ours = (name for name in os.environ if name.startswith("PRETRAINKIT_"))
    names = {*plain, *secret, *ours, *plan.environment, *plan.asked_environment, "CUDA_VISIBLE_DEVICES"}
    inside = {name: os.environ[name] for name in names if name in os.environ}
    inside |= {"PYTHONNOUSERSITE": "1", "PYTHONPATH": str(Path(pretrainkit.__file__).parents[1])}
    os.environ.update({f"APPTAINERENV_{name}": value for name, value in inside.items()})


def _literal(word: str) -> str:
    """A word that NeMo-Run's scheduler, which fills in $names in arguments, passes on as it is."""
    return word.replace("$", "$$")


@contextlib.contextmanager
def _forwarded_signals(log_dir: Path) -> Iterator[StopRequests]:
    """Let the attempt's node process know of the stop signals that this process gets, as soon as there is one."""
    requests, ctrl_c_s = StopRequests(), math.inf

    def request(number: int, _: Any) -> None:
        nonlocal ctrl_c_s
        if not requests.asked:
            log.warning("stopping: the ranks save and end; a second Ctrl-C kills them")
        requests.add(number)
        if number == signal.SIGINT:
            if time.monotonic() - ctrl_c_s >= _SECOND_CTRL_C_S:
                requests.add(KILL_SIGNAL)
            ctrl_c_s = min(ctrl_c_s, time.monotonic())

    ended = threading.Event()
    thread = threading.Thread(target=_deliver, args=(log_dir, requests, ended), name="signals", daemon=True)
    previous = {
        number: signal.signal(number, request)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup means it
    }
    thread.start()
    try:
        yield requests
    finally:
        ended.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _deliver(log_dir: Path, requests: StopRequests, ended: threading.Event) -> None:
    delivered: set[int] = set()
    pid_file = log_dir / PID_FILE
    while not ended.wait(_DELIVERY_INTERVAL_S):
        number = KILL_SIGNAL if requests.is_urgent else signal.SIGTERM
        if requests.asked and number not in delivered and pid_file.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), number)
                delivered.add(number)
