"""Full disks, kills and signals at any moment: outputs are whole or absent, and a rerun completes them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from preprocess_runs import end, finish, wait_for

pytestmark = pytest.mark.integration
SUPPORT = Path(__file__).parents[1] / "support"
StartTask = Callable[..., "subprocess.Popen[str]"]
STEP = os.environ.get("PRETRAINKIT_FAULT_STEP", "7")
"""Every which change is tried; 1: all of them."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SUPPORT / "faults.c", "-ldl"], check=True)
    return library


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the faults are made by a library in C")
@pytest.mark.parametrize("kind", ["full", "kill"])
@pytest.mark.parametrize("form", ["shards", "packed"])
def test_outputs_are_whole_or_absent_and_a_rerun_completes_them(
    form: str, kind: str, shim: Path, tokenizer_folder: Path, jsonl_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(jsonl_file.read_text().splitlines(keepends=True)[:8]) + '{"text": 5}\n')
    words = [form, kind, STEP, source, tokenizer_folder, tmp_path]
    done = subprocess.run(
        [sys.executable, SUPPORT / "shard_faults.py", *map(str, words)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ changes\n", done.stdout), done.stdout + done.stderr[-2000:]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Half a second of work or more."""
    source = tmp_path_factory.mktemp("large") / "in.txt"
    source.write_bytes(b"a line of a text that takes some time to encode\n" * 1_000_000)
    yield source
    source.unlink()


@pytest.fixture
def start_task(tmp_path: Path, tokenizer_folder: Path) -> Iterator[StartTask]:
    """Start make_shards.py for shard 0 of a file, in a process group of its own that ends with the test."""
    tasks = []

    def start(source: Path, *words: object, **environment: str) -> subprocess.Popen[str]:
        common = ["--shard_id", 0, "--input_dir", source, "--output_dir", tmp_path / "out", "--verify_tokens", "off"]
        task = subprocess.Popen(
            [sys.executable, "tools/make_shards.py", *map(str, [*common, "--model_id", tokenizer_folder, *words])],
            cwd=SUPPORT.parents[1],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        tasks.append(task)
        return task

    yield start
    for task in tasks:
        end(task)


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*"))


def is_in_progress(out: Path) -> bool:
    """Whether a piece of the shard was written, so that workers are at the next."""
    try:
        return any(path.stat().st_size for path in out.glob("*.tar.tmp-*"))
    except FileNotFoundError:
        return False


def halted_at_work(start: Callable[[], subprocess.Popen[str]], out: Path) -> subprocess.Popen[str]:
    """A task that stands still (SIGSTOP) while it writes its shard; one that was too quick is started again."""
    task = start()
    state = psutil.Process(task.pid)
    wait_for(lambda: is_in_progress(out) or state.status() == psutil.STATUS_ZOMBIE)
    task.send_signal(signal.SIGSTOP)
    wait_for(lambda: state.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    if is_in_progress(out):
        return task
    task.send_signal(signal.SIGCONT)
    code, errors = finish(task)
    assert code == 0, errors
    shutil.rmtree(out)
    return halted_at_work(start, out)


def is_stuck(worker: psutil.Process) -> bool:
    """Whether it waits, and did no work for a while."""
    before = worker.cpu_times()
    time.sleep(0.2)
    return worker.status() == psutil.STATUS_SLEEPING and worker.cpu_times() == before


@pytest.mark.parametrize(
    ("number", "is_to_all", "code", "told"),
    [
        (signal.SIGTERM, True, 85, "stopped by SIGTERM"),
        (signal.SIGINT, True, 85, "stopped by SIGINT"),
        (signal.SIGKILL, False, 1, "was killed by signal 9 (SIGKILL)"),
    ],
    ids=["SIGTERM", "Ctrl-C", "a-worker-killed"],
)
def test_a_signal_while_workers_send_ends_the_task_and_leaves_nothing(
    number: signal.Signals, is_to_all: bool, code: int, told: str, large: Path, start_task: StartTask, tmp_path: Path
) -> None:
    task = halted_at_work(lambda: start_task(large, "--workers", 2), tmp_path / "out")
    # It takes no pieces now, so that the workers get stuck in the midst of sending one.
    workers = [child for child in psutil.Process(task.pid).children(recursive=True) if not child.children()]
    assert len(workers) >= 2
    wait_for(lambda: all(map(is_stuck, workers)))
    if is_to_all:
        os.killpg(task.pid, number)
    else:
        workers[0].send_signal(number)
    task.send_signal(signal.SIGCONT)
    found, errors = finish(task)
    assert (found, left(tmp_path / "out")) == (code, []), errors
    assert told in errors and "run the same" in errors
    assert not psutil.wait_procs(workers, timeout=30)[1]


def test_a_stop_while_fastokens_loads_is_not_taken_for_its_failure(
    jsonl_file: Path, start_task: StartTask, tmp_path: Path
) -> None:
    (tmp_path / "fastokens.py").write_text(
        "import os, signal\n"
        "class Tokenizer:\n"
        "    @staticmethod\n"
        "    def from_file(path):\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
    )
    code, errors = finish(start_task(jsonl_file, PYTHONPATH=str(tmp_path)))
    assert (code, left(tmp_path / "out")) == (85, []), errors
    assert "stopped by SIGTERM" in errors and "fastokens is not used" not in errors


def test_a_second_task_for_a_shard_is_refused_and_the_first_goes_on(
    large: Path, start_task: StartTask, tmp_path: Path
) -> None:
    first = halted_at_work(lambda: start_task(large, "--workers", 1), tmp_path / "out")
    before = left(tmp_path / "out")
    code, errors = finish(start_task(large, "--workers", 1))
    assert code == 2, errors
    assert (
        f"process {first.pid} of this host is making this shard" in errors
        and "What to do: wait until it ends" in errors
    )
    assert left(tmp_path / "out") == before
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    assert finish(first)[0] == 85 and left(tmp_path / "out") == []


def test_what_ended_tasks_left_is_removed(jsonl_file: Path, start_task: StartTask, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "out").mkdir()
    for owner in (f"{socket.gethostname()}-{ended.pid}", "another-host-1"):
        (tmp_path / "out" / f"shard-00000.tar.tmp-{owner}").write_bytes(b"part")
    code, errors = finish(start_task(jsonl_file))
    assert code == 0, errors
    assert left(tmp_path / "out") == ["shard-00000.json", "shard-00000.samples", "shard-00000.tar"]


@pytest.mark.parametrize("below", ["", "sub/set"], ids=["itself", "a-parent"])
def test_an_output_folder_that_is_a_file_is_named(
    below: str, jsonl_file: Path, start_task: StartTask, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, errors = finish(start_task(jsonl_file, "--output_dir", file / below))
    assert code == 2
    assert f"{file}: is a file\n  Needed: a folder" in errors
