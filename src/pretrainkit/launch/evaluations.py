"""Evaluations that follow the saves of a run on this machine (--eval_tasks).

While the ranks train, one process of the lowest priority evaluates on the CPU what is due. What is left at the end of
the run is evaluated then, on the GPUs if there are any.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from pretrainkit.evaluation.tasks import check_loading
from pretrainkit.logs import get_logger
from pretrainkit.run import evaluations
from pretrainkit.run.folder import RunFolder

_POLL_S = 2.0
_LOG = "evaluation.log"

log = get_logger(__name__)


def fetch_tasks(tasks: Sequence[str]) -> None:
    """Let a process of its own load tasks, and fetch their data, before a run starts that will need them.

    Raises RequestError for an unknown task, and when its data can't be had.
    """
    log.info("loading the tasks of --eval_tasks")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_loading, tuple(tasks)).result()


@contextlib.contextmanager
def evaluated_meanwhile(folder: RunFolder, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """In the block, run `command` whenever checkpoints are due, with its output in a file; it ends with the block."""
    ended, running = threading.Event(), list[subprocess.Popen[bytes]]()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if (running and running[-1].poll() is None) or not evaluations.pending(folder):
                continue
            with (folder.evaluations / _LOG).open("ab") as output:
                running.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
                )

    thread = threading.Thread(target=watch, name="evaluations", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for process in running[-1:]:
            process.terminate()
            process.wait()


def evaluate_rest(folder: RunFolder, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Evaluate what is still due after the run has ended; a failure or Ctrl-C changes nothing of the run."""
    waiting = evaluations.pending(folder)
    if not waiting:
        return
    log.info("the run is done; evaluating %s (Ctrl-C leaves them)", ", ".join(path.name for path in waiting))
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment).returncode
    except KeyboardInterrupt:
        code = -1
    if code:
        log.warning("not all evaluated: tools/evaluate.py %s --pending goes on", folder.path)
