"""preprocess_data.py killed, stopped, on a full disk: a right output or none, and the next run ends right."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from preprocess_runs import ROOT, Start, digest, family_of, finish, is_alive, journal_lines, wait_for

pytestmark = pytest.mark.integration


def test_a_kill_at_any_moment_leaves_no_wrong_pair_and_the_next_run_ends_right(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str
) -> None:
    """SOAK_KILLS=300 in the environment makes it a soak of some minutes."""
    wanted, generator = int(os.environ.get("SOAK_KILLS", "8")), random.Random(7)
    kills = continued = ends = 0
    while kills < wanted or not ends:
        for path in tmp_path.glob("out_text_document.*"):
            path.unlink()
        while True:
            process = start("--input", corpus, workers=generator.choice([1, 2, 4]))
            end = time.monotonic() + (generator.uniform(0.1, 2.5) if kills < wanted else 300)
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            family = family_of(process.pid)
            if process.poll() is None:
                kills += 1
                victim = generator.choice([process.pid, process.pid, *family])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            code, errors = finish(process, 30)
            continued += "continuing unfinished work" in errors
            assert digest(tmp_path) in (None, undisturbed)
            wait_for(lambda left=family: not any(map(is_alive, left)), 20)
            if code == 0:
                break
            assert code in (-signal.SIGKILL, -signal.SIGTERM, 1, 85), errors  # SIGTERM: it came before any work
        assert digest(tmp_path) == undisturbed
        assert not (tmp_path / "out.partial").exists()
        ends += 1
    print(f"{kills} kills, {continued} continued, {ends} ended: none wrong")
    assert continued


KILLED_AT = """
import os, signal, sys
sys.path.insert(0, {tools!r})
import preprocess_data

left = int(sys.argv.pop(1))

def count(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
sys.exit(preprocess_data.main(sys.argv[1:]))
"""


def test_a_kill_at_any_change_of_a_folder_is_mended_by_the_same_command(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some text"}\n{"txt": 1}\n{"text": "more"}\n')
    arguments = ["--input", "in.jsonl", "--output-prefix", "out", "--tokenizer-model", str(tokenizer_folder)]
    arguments += ["--append-eod", "--workers", "1", "--on-error", "skip", "--quiet"]
    killed = [sys.executable, "-c", KILLED_AT.format(tools=str(ROOT / "tools"))]
    right, moment = None, -1
    while True:
        moment += 2  # every second one: they come in pairs that differ little, and a start takes half a second
        process = subprocess.run([*killed, str(moment), *arguments], cwd=tmp_path, capture_output=True, text=True)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr
        before = digest(tmp_path)
        again = subprocess.run(
            [sys.executable, ROOT / "tools/preprocess_data.py", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert again.returncode == 0, f"killed at {moment}: {again.stderr}"
        right = right or digest(tmp_path)
        assert digest(tmp_path) == right
        assert before in (None, right)
        names = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
        assert names == {"out.rejects.jsonl", *(f"out_text_document.{k}" for k in ("bin", "idx", "manifest.json"))}
        for name in names:
            (tmp_path / name).unlink()
    assert moment > 10


FULL_AT = """
import sys
sys.path.insert(0, {tools!r})
import preprocess_data

left = int(sys.argv.pop(1))

def count(event, arguments):
    global left
    if event == "os.rename" and "out_text" in str(arguments[1]):
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")

sys.addaudithook(count)
sys.exit(preprocess_data.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("moment", [2, 5])
def test_a_disk_that_is_full_at_the_renaming_leaves_the_old_set(
    tmp_path: Path, tokenizer_folder: Path, moment: int
) -> None:
    words = ["--output-prefix", "out", "--tokenizer-model", str(tokenizer_folder), "--engine", "tokenizers"]
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    command = [sys.executable, "-c", FULL_AT.format(tools=str(ROOT / "tools"))]
    names = {f"out_text_document.{kind}" for kind in ("bin", "idx", "manifest.json")}
    (tmp_path / "in.jsonl").write_text('{"text": "old"}\n')
    if moment > 3:  # an old set; its three files are moved aside first
        assert run([*command, "0", *words, "--input", "in.jsonl"]).returncode == 0
    before = {name: (tmp_path / name).read_bytes() for name in names if (tmp_path / name).exists()}
    (tmp_path / "in.jsonl").write_text('{"text": "new text"}\n')
    full = run([*command, str(moment), *words, "--input", "in.jsonl", "--overwrite"])
    assert full.returncode == 1 and "No space left on device" in full.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out_*")} == before
    again = run([*command, "0", *words, "--input", "in.jsonl", "--overwrite"])
    assert again.returncode == 0, again.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", *names}


@pytest.mark.parametrize(
    ("victim", "name"), [(-1, "worker 1"), (0, "the process that loads the tokenizer")], ids=["worker", "loader"]
)
def test_a_killed_process_is_named_and_its_work_is_done_again(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str, victim: int, name: str
) -> None:
    process = start("--input", corpus)
    wait_for(lambda: journal_lines(tmp_path) > 2)
    family = family_of(process.pid)  # the loader, for a while the process that proves the ids, and the workers
    os.kill(family[victim], signal.SIGKILL)
    began = time.monotonic()
    code, errors = finish(process)
    assert code == 1
    assert f"{name} (process {family[victim]}) was killed by signal 9" in errors
    assert time.monotonic() - began < 10
    assert digest(tmp_path) is None
    wait_for(lambda: not any(map(is_alive, family)))
    code, errors = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed)
    assert "continuing unfinished work" in errors


def test_streams_are_continued_inside(start: Start, tmp_path: Path, corpus: Path) -> None:
    data = (corpus / "a.jsonl").read_bytes()
    for name in ("in/a.jsonl.gz", "in/b.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(data, 1))
    assert finish(start("--input", "in"))[0] == 0
    undisturbed = digest(tmp_path)
    for _ in range(3):
        process = start("--input", "in", "--overwrite")
        wait_for(lambda: journal_lines(tmp_path) > 1)
        process.kill()
        finish(process)
        code, errors = finish(start("--input", "in", "--overwrite"))
        assert (code, digest(tmp_path)) == (0, undisturbed), errors
        assert "continuing unfinished work" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_stops_quickly_and_the_next_run_continues(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str, number: int
) -> None:
    process = start("--input", corpus)
    wait_for(lambda: journal_lines(tmp_path) > 2)
    os.killpg(process.pid, number)
    code, errors = finish(process, 10)
    assert code == 85
    assert "run the same command again" in errors
    assert digest(tmp_path) is None
    code, errors = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed)
    assert "continuing unfinished work" in errors


def test_a_file_that_can_not_grow_ends_with_its_name_and_can_be_continued(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str
) -> None:
    code, errors = finish(start("--input", corpus, file_limit=12 << 20))
    assert code == 1
    assert "File too large" in errors
    assert "out.partial" in errors
    assert digest(tmp_path) is None
    code, _ = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_with_its_name_and_can_be_continued(
    start: Start, tmp_path: Path, small_disk: Path, corpus: Path, undisturbed: str
) -> None:
    arguments = ("--input", corpus, "--output-prefix", small_disk / "out")
    began = time.monotonic()
    code, errors = finish(start(*arguments))
    assert time.monotonic() - began < 10
    assert code == 1
    assert "No space left on device" in errors
    assert str(small_disk / "out.partial") in errors
    assert "run the same command again" in errors
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    code, errors = finish(start(*arguments))
    assert (code, digest(small_disk)) == (0, undisturbed)
    assert "continuing unfinished work" in errors


def test_lost_data_of_unfinished_work_is_found_and_made_again(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str
) -> None:
    process = start("--input", corpus)
    wait_for(lambda: journal_lines(tmp_path) > 4)
    process.kill()
    finish(process)
    tokens = tmp_path / "out.partial/output-0.0.bin"
    with tokens.open("r+b") as file:
        file.seek(tokens.stat().st_size // 3)
        file.write(bytes(4096))
    for part in (tmp_path / "out.partial").glob("*.part"):
        os.truncate(part, part.stat().st_size // 2)
    code, errors = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed), errors
