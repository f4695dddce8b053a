"""Starts the program with the hooks in it, and collects what its ranks have written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import pretrainkit
from pretrainkit import files
from pretrainkit.diagnosis import sandbox
from pretrainkit.diagnosis.machine import watched
from pretrainkit.diagnosis.observe import uploads
from pretrainkit.diagnosis.observe.sampler import read_workers
from pretrainkit.diagnosis.processes import Watch, read_ranks
from pretrainkit.diagnosis.program import Program
from pretrainkit.diagnosis.spec import SPEC_VARIABLE, UNSET_VARIABLE, Spec
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError
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
    folder: Path
    cut_short: str = ""
    """Why not all was measured."""
    broken: tuple[str, ...] = ()
    """Probes that the program doesn't bear."""
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
    starts: list[Path] = field(default_factory=list)

    def measure(self, *, unset: tuple[str, ...] = (), changes: dict[str, Any] | None = None, **spec: Any) -> Measured:
        """One measurement; `changes` are of a run's training settings, `unset` variables are taken away.

        Raises PretrainkitError with the end of the program's output when it fails for another reason than a probe.
        """
        excluded: tuple[str, ...] = self.spec.excluded
        for _ in range(MOST_RETRIES):
            folder = self.scratch / f"start_{len(self.starts)}"
            self.starts.append(folder)
            folder.mkdir(parents=True)
            asked = dataclasses.replace(self.spec, folder=str(folder), excluded=excluded, **spec)
            files.write_json(folder / "spec.json", dataclasses.asdict(asked))
            late = ""
            with watched() as machine:
                try:
                    exit_code, unmeasured = self._run(folder, unset, changes or {})
                except subprocess.TimeoutExpired:
                    exit_code, unmeasured = EXIT_FAILED, []
                    late = f"it took longer than {self.longest_s:.0f} s (--longest_s)"
            notes = tuple([f"not measured: {item}" for item in unmeasured] + _protected(folder))
            ranks = _read_ranks(folder)
            tried = {path.read_text() for path in folder.glob("trying_*")} - {""}
            if ranks and all(rank.get("ended") for rank in ranks):
                return Measured(ranks, machine, folder, "", tuple(set(excluded) - set(self.spec.excluded)), notes)
            has_windows = bool(ranks) and all("windows" in rank for rank in ranks)
            if has_windows and (late or (exit_code == 0 and not tried)):
                if late and tried:
                    late += f", while {', '.join(sorted(tried))} was tried"
                why = late or "it has come to its own end: more of its steps are needed"
                log.warning("the program ended before all was measured: %s", why)
                return Measured(ranks, machine, folder, why, notes=notes)
            if late:
                raise PretrainkitError(
                    f"the program took longer than {self.longest_s:.0f} s",
                    action="--longest_s allows more; its output:\n" + _tail(folder),
                    where=self.program.name,
                )
            if not tried:
                raise _failed(self.program, folder, exit_code, bool(ranks), unmeasured)
            log.warning("the program fails with %s: it is started again without", ", ".join(sorted(tried)))
            excluded = (*excluded, *sorted(tried))
        raise _failed(self.program, folder, exit_code, True, [])

    def _run(self, folder: Path, unset: tuple[str, ...], changes: dict[str, Any]) -> tuple[int, list[str]]:
        """Exit code, and processes that weren't measured."""
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
            trackers = folder / "trackers"
            trackers.mkdir()
            environment |= uploads.offline(environment, trackers)
        if unset:
            environment[UNSET_VARIABLE] = ",".join(unset)
        command = self.program.start_command(folder, changes)
        outputs = self.scratch / f"files_{len(self.starts)}"
        outputs.mkdir()
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

    def _wait(self, process: subprocess.Popen[bytes], watch: Watch) -> tuple[int, list[str]]:
        """Wait until all is measured, nothing can be, or the program ends. Raises TimeoutExpired."""
        begin_s = shown_s = time.monotonic()
        shown = ""
        while process.poll() is None:
            now_s = time.monotonic()
            if watch.has_ended():
                return EXIT_DONE, list(watch.unmeasured.values())
            if watch.is_hopeless():
                break
            if now_s - begin_s > self.longest_s:
                raise subprocess.TimeoutExpired(self.program.name, self.longest_s)
            if now_s - shown_s > PROGRESS_EVERY_S and (text := watch.progress()) != shown:
                log.info("%s", text)
                shown, shown_s = text, now_s
            time.sleep(POLL_S)
        return process.returncode or EXIT_DONE, list(watch.unmeasured.values())


def _protected(folder: Path) -> list[str]:
    return [f"the program could only read {item}" for item in sandbox.read_only_places(folder)]


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


def _read_ranks(folder: Path) -> list[dict[str, Any]]:
    ranks = read_ranks(folder)
    for rank in ranks:
        rank["worker_samples"] = read_workers(folder, rank["rank"])
    return ranks if not ranks or len(ranks) == ranks[0]["world_size"] else []


def _tail(folder: Path) -> str:
    """The end of what the program has written to its outputs."""
    attempt = RunFolder(folder).attempt(1)
    logs = [folder / "output.log", attempt / "node.log", *sorted(attempt.glob("rank_*.err"))]
    tail = ""
    for path in logs:
        if path.is_file() and path.stat().st_size:
            tail = path.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
    return tail


def _failed(
    program: Program, folder: Path, exit_code: int, has_trained: bool, unmeasured: list[str]
) -> PretrainkitError:
    if unmeasured and not has_trained:
        return PretrainkitError(
            "it trains where it can't be measured:\n" + "\n".join(unmeasured),
            needed="a loop with backward() and a torch optimizer's step(), in Python with this environment",
            where=program.name,
        )
    tail = _tail(folder)
    seen = read_ranks(folder)
    if seen and len(seen) < seen[0]["world_size"] and exit_code == 0:
        return PretrainkitError(
            f"{len(seen)} of {seen[0]['world_size']} ranks were seen",
            needed="all ranks on this machine",
            action="diagnose the same command on one node",
            where=program.name,
        )
    if exit_code in (0, EXIT_STOPPED_AFTER_SAVING) and not has_trained:
        return PretrainkitError(
            "the program ended before it had trained enough steps, or no step was seen",
            needed="a loop with backward() and a torch optimizer's step(), of some dozens of steps",
            action="give it more steps or data; its output:\n" + tail,
            where=program.name,
        )
    return PretrainkitError(f"the program failed with exit code {exit_code}:\n{tail}", where=program.name)
