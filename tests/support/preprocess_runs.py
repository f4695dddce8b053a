"""preprocess_data.py as a process that tests disturb, and what is left of it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
JOURNAL = "out.partial/journal.jsonl"
Start = Callable[..., subprocess.Popen[str]]


def start(
    folder: Path, tokenizer: Path, *arguments: object, workers: int = 2, file_limit: int | None = None
) -> subprocess.Popen[str]:
    """Start it in a folder, in a process group of its own, with output `out` there."""
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--tokenizer-model", tokenizer]
    command += ["--output-prefix", "out", "--workers", workers, "--append-eod", *arguments]

    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=limit,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End it with all that it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def write_corpus(folder: Path) -> None:
    """48 MB in a plain file, a gz one and small ones."""
    generator = random.Random(1)
    words = ["token", "日本", "한국어", "data ", "\n", "engine", "0123", "é", "中文字", " "]
    texts = ["".join(generator.choices(words, k=generator.randrange(2_000))) for _ in range(2_000)]

    def lines(count: int) -> bytes:
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in generator.choices(texts, k=count))

    (folder / "a.jsonl").write_bytes(lines(4_000))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(1_500), 1))
    for i in range(60):
        (folder / f"small{i}.jsonl").write_bytes(lines(5))


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str]:
    """Exit code and stderr."""
    _, errors = process.communicate(timeout=timeout_s)
    return process.returncode, errors


def digest(folder: Path) -> str | None:
    """Of the pair `out`; None when it is not complete."""
    files = [folder / f"out_text_document.{kind}" for kind in ("bin", "idx")]
    if not all(file.exists() for file in files):
        return None
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def family_of(process: int) -> list[int]:
    """A process's children, and theirs."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [member for child in map(int, children) for member in (child, *family_of(child))]


def wait_for(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def journal_lines(folder: Path) -> int:
    journal = folder / JOURNAL
    return journal.read_bytes().count(b"placed") if journal.exists() else 0


def is_alive(process: int) -> bool:
    """Whether it is there and no mere entry of an ended one."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
