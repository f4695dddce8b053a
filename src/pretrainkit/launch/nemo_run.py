"""Starts a plan through NeMo-Run. The only module that knows nemo_run.

NeMo-Run's LocalExecutor can't be told to stop: when its process is killed, what it started runs on. So this
module passes signals to the node process itself, and takes over and ends whatever outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrainkit.launch.node import PID_FILE, STOP_SIGNALS, StopRequests
from pretrainkit.launch.outcome import Outcome, read_outcome
from pretrainkit.launch.plan import NODE_MODULE, LaunchPlan
from pretrainkit.launch.processes import adopt_orphans, kill_descendants
from pretrainkit.logs import get_logger

HOME_NAME = ".nemo_run"
"""NeMo-Run's own records, in the experiment's folder instead of the user's home."""
_DELIVERY_INTERVAL_S = 0.1

log = get_logger(__name__)


def run_local(plan: LaunchPlan) -> Outcome:
    """Start an attempt on this machine, wait for its end, and say how it ended. Must run in the main thread.

    Signals that ask to stop are passed on: after the first the ranks save and end, after the second they are
    killed. Nothing that was started is left when this returns.
    """
    adopt_orphans()
    with _forwarded_signals(plan.log_dir):
        _run_experiment(plan)
    if left := kill_descendants():  # its node process was killed
        log.warning("processes that were left behind are killed: %s", ", ".join(map(str, left)))
    return read_outcome(plan.log_dir)


def _run_experiment(plan: LaunchPlan) -> None:
    home = plan.experiment_dir / HOME_NAME
    os.environ["NEMORUN_HOME"] = str(home)  # read when nemo_run is imported
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    import nemo_run

    executor = nemo_run.LocalExecutor()
    script = nemo_run.Script(
        path=NODE_MODULE, m=True, entrypoint=sys.executable, args=[_literal(word) for word in plan.node_arguments]
    )
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


def _literal(word: str) -> str:
    """A word that NeMo-Run's scheduler, which fills in $names in arguments, passes on as it is."""
    return word.replace("$", "$$")


@contextlib.contextmanager
def _forwarded_signals(log_dir: Path) -> Iterator[None]:
    """Pass every stop signal that this process gets to the attempt's node process, as soon as there is one."""
    requests = StopRequests()

    def request(*_: Any) -> None:
        requests.add()
        if requests.count == 1:
            log.warning("stopping: the ranks save and end; a second signal (Ctrl-C) kills them")

    ended = threading.Event()
    thread = threading.Thread(target=_deliver, args=(log_dir, requests, ended), name="signals", daemon=True)
    previous = {
        number: signal.signal(number, request)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup means it
    }
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _deliver(log_dir: Path, requests: StopRequests, ended: threading.Event) -> None:
    delivered = 0
    while not ended.wait(_DELIVERY_INTERVAL_S):
        pid_file = log_dir / PID_FILE
        if delivered < requests.count and pid_file.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
                delivered += 1
