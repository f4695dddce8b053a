"""Runs of pretrain.py and of tools on a scheduler, and what can be seen of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 240


@dataclass(frozen=True)
class Site:
    """A site's file for one of the schedulers that the tests start."""

    executor: str
    file: Path

    @classmethod
    def write(cls, folder: Path, executor: str, **fields: Any) -> Site:
        """Write the file."""
        file = folder / "site.yaml"
        file.write_text(yaml.safe_dump({"executor": executor, "container_runtime": "none", **fields}))
        return cls(executor, file)

    def run(
        self, script: str, *words: object, cwd: Path = REPOSITORY, with_site: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the project's commands to its end, for this site unless it has no such flag."""
        process = self.start(script, *words, cwd=cwd, with_site=with_site)
        try:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            stderr += f"\nno end within {DEADLINE_S} s"
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(
        self, script: str, *words: object, cwd: Path = REPOSITORY, with_site: bool = True
    ) -> subprocess.Popen[str]:
        """Start one of the project's commands."""
        site = ["--site", str(self.file)] if with_site else []
        command = [sys.executable, str(REPOSITORY / script), *map(str, words), *site]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)

    @staticmethod
    def command(*words: str) -> str:
        """What one of the scheduler's own commands prints; its exit code is not looked at."""
        return subprocess.run(words, capture_output=True, text=True).stdout

    def is_there(self, job_id: str) -> bool:
        """Whether the scheduler has a job waiting or running."""
        if self.executor == "slurm":
            return bool(self.command("squeue", "--noheader", "--states=PD,R,CG", "--jobs", job_id).strip())
        return bool(self.command("qstat", *(["-j"] if self.executor == "sge" else []), job_id))


def job_ids(stdout: str) -> list[str]:
    """Ids of the jobs that a command says it has submitted."""
    return [line.split()[1] for line in stdout.splitlines() if line.startswith("job ")]


def records(experiment: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are complete."""
    path = experiment / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(experiment: Path) -> dict[int, float]:
    """The training loss of each step."""
    return {
        record["step"]: record["loss"]
        for record in records(experiment)
        if "loss" in record and "learning_rate" in record
    }


def checkpoints(experiment: Path) -> list[str]:
    """Names of the checkpoints, oldest first."""
    return sorted(path.name for path in (experiment / "checkpoints").glob("step_*"))


def outcome(experiment: Path, attempt: int = 1) -> dict[str, Any]:
    """How an attempt ended; empty while it hasn't."""
    path = experiment / "logs" / f"attempt_{attempt}" / "outcome.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return result


def logs(experiment: Path) -> str:
    """What the nodes and ranks of all attempts have said, for a failing test."""
    paths = [*sorted(experiment.glob("logs/attempt_*/*.log")), *sorted(experiment.glob("logs/attempt_*/*.err"))]
    return "\n".join(f"{path}:\n{path.read_text(encoding='utf-8', errors='replace')[-4000:]}" for path in paths)


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that a job does."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.2)
