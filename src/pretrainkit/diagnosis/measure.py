"""Starts the program with the hooks in it, and collects what its ranks have written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import pretrainkit
from pretrainkit import files
from pretrainkit.diagnosis import sandbox
from pretrainkit.diagnosis.machine import watched
from pretrainkit.diagnosis.observe import uploads
from pretrainkit.diagnosis.processes import Watch
from pretrainkit.diagnosis.program import Program
from pretrainkit.diagnosis.spec import SPEC_VARIABLE, UNSET_VARIABLE, Spec
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING, PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.run.folder import RunFolder

INJECTED = Path(__file__).with_name("inject")
MOST_RETRIES = 4
"""Starts after a probe has broken the program, each without that probe."""
POLL_S, PROGRESS_EVERY_S = 0.2, 5.0
TAIL_CHARACTERS = 3000
GRACE_S = 15

log = get_logger(__name__)


@dataclass(frozen=True)
class Measured:
    """What one start of the program has given."""

    ranks: list[dict[str, Any]]
    """Each rank's results, by rank."""
    machine: dict[str, Any]
    cut_short: str = ""
    """Why not all was measured."""
    broken: tuple[str, ...] = ()
    """Probes that make the program fail."""
    notes: tuple[str, ...] = ()
    """Processes that weren't measured, and places that the program couldn't write to."""


@dataclass(frozen=True)
class Starter:
    """Starts one program again and again."""

    program: Program
    spec: Spec
    scratch: Path
    longest_s: float
    is_protected: bool
    """Nothing that the program writes or deletes stays."""
    keep: bool
    """Keep what it has written, in the scratch folder."""

    def measure(self, *, unset: tuple[str, ...] = (), changes: dict[str, Any] | None = None, **spec: Any) -> Measured:
        """One measurement; `changes` are of a run's training settings, `unset` variables are taken away.

        Raises PretrainkitError with the end of the program's output when it fails for another reason than a probe.
        """
        broken: tuple[str, ...] = ()
        for _ in range(MOST_RETRIES):
            folder = Path(tempfile.mkdtemp(prefix="start-", dir=self.scratch))
            excluded = (*self.spec.excluded, *broken)
            asked = dataclasses.replace(self.spec, folder=str(folder), excluded=excluded, **spec)
            files.write_json(folder / "spec.json", dataclasses.asdict(asked))
            with watched() as machine:
                exit_code, unmeasured = self._run(folder, unset, changes or {})
            if self.is_protected:
                sandbox.check(folder, (folder / "output.log").read_text(errors="replace"))
            notes = [f"not measured: {item}" for item in unmeasured]
            notes += [f"the program could only read {item}" for item in sandbox.read_only_places(folder)]
            ranks = sorted(map(files.read_json, folder.glob("rank_*.json")), key=lambda rank: int(rank["rank"]))
            is_whole = bool(ranks) and len(ranks) == ranks[0]["world_size"]
            tried = {path.read_text() for path in folder.glob("trying_*")} - {""}
            if is_whole and all(rank.get("ended") for rank in ranks):
                return Measured(ranks, machine, "", broken, tuple(notes))
            late = f"it took longer than {self.longest_s:.0f} s (--longest_s)" if exit_code is None else ""
            if is_whole and all("windows" in rank for rank in ranks) and (late or not (exit_code or tried)):
                why = late or "it has come to its own end: more of its steps are needed"
                why += f", while {', '.join(sorted(tried))} was tried" if tried else ""
                log.warning("the program ended before all was measured: %s", why)
                return Measured(ranks, machine, why, broken, tuple(notes))
            if late or not tried:
                break
            log.warning("the program fails with %s: it is started again without", ", ".join(sorted(tried)))
            broken = (*broken, *sorted(tried))
        raise _failed(self.program, folder, ranks, late, exit_code, unmeasured)

    def _run(self, folder: Path, unset: tuple[str, ...], changes: dict[str, Any]) -> tuple[int | None, list[str]]:
        """Exit code, None when it took too long, and processes that weren't measured."""
        paths = [str(INJECTED), str(Path(pretrainkit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        # What the program's own paths were; a script's folder is added by Python itself.
        if self.program.kind == "module":
            paths.insert(1, str(Path.cwd()))
        environment = {
            **os.environ,
            **self.program.start_environment(),
            SPEC_VARIABLE: str(folder / "spec.json"),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        if self.program.kind != "experiment":  # a run of this project is started without trackers
            environment |= uploads.offline(environment, folder)
        if unset:
            environment[UNSET_VARIABLE] = ",".join(unset)
        command = self.program.start_command(folder, changes)
        outputs = Path(tempfile.mkdtemp(prefix="files-", dir=self.scratch))
        if self.is_protected:
            command = sandbox.command(command, outputs, keep=folder)
        with (folder / "output.log").open("wb") as output:
            try:
                process = subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise PretrainkitError(
                    f"can't be started: {error.strerror}", where=command[0], needed="a command that trains"
                ) from error
            try:
                return self._wait(process, Watch(folder, process.pid))
            finally:
                _end(process)
                if not self.keep:
                    sandbox.remove(outputs)

    def _wait(self, process: subprocess.Popen[bytes], watch: Watch) -> tuple[int | None, list[str]]:
        """Wait until all is measured, nothing can be, the program ends, or it has taken too long."""
        begin_s = shown_s = time.monotonic()
        shown = ""
        while process.poll() is None:
            now_s = time.monotonic()
            if watch.has_ended() or watch.is_hopeless():
                break
            if now_s - begin_s > self.longest_s:
                return None, []
            if now_s - shown_s > PROGRESS_EVERY_S and (text := watch.progress()) != shown:
                log.info("%s", text)
                shown, shown_s = text, now_s
            time.sleep(POLL_S)
        return process.returncode or EXIT_DONE, watch.unmeasured


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all that it has started: launchers give ranks a session of their own."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            files.wait_until(lambda: process.poll() is not None, timeout_s=GRACE_S, poll_s=0.05)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()


def _tail(folder: Path) -> str:
    """The end of what the program has written to its outputs."""
    attempt = RunFolder(folder).attempt(1)
    logs = [folder / "output.log", attempt / "node.log", *sorted(attempt.glob("rank_*.err"))]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in logs if path.is_file()]
    return next((text[-TAIL_CHARACTERS:] for text in reversed(texts) if text), "")


def _failed(
    program: Program,
    folder: Path,
    ranks: list[dict[str, Any]],
    late: str,
    exit_code: int | None,
    unmeasured: list[str],
) -> PretrainkitError:
    """The error for a program of which nothing can be reported."""
    tail = f"its output:\n{_tail(folder)}"
    found, needed, action = f"the program failed with exit code {exit_code}", "", tail
    if late:
        found, action = late, f"--longest_s allows more; {tail}"
    elif unmeasured and not ranks:
        found, action = "it trains where it can't be measured:\n" + "\n".join(unmeasured), ""
        needed = "a loop with backward() and a torch optimizer's step(), in Python with this environment"
    elif exit_code == EXIT_DONE and ranks and len(ranks) < ranks[0]["world_size"]:
        found, action = f"{len(ranks)} of {ranks[0]['world_size']} ranks were seen", "diagnose it on one node"
        needed = "all ranks on this machine"
    elif exit_code in (EXIT_DONE, EXIT_STOPPED_AFTER_SAVING):
        found = "the program ended before it had trained enough steps, or no step was seen"
        needed = "a loop with backward() and a torch optimizer's step(), of some dozens of steps"
        action = f"give it more steps or data; {tail}"
    return PretrainkitError(found, needed=needed, action=action, where=program.name)
