"""preprocess_data.py under kills, signals, full disks and races: a right output or none, and the same one always."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, tokenizer_folder: Path) -> Iterator[Start]:
    """Start preprocess_data.py in an empty folder, in a process group of its own, with output `out`."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, workers: int = 2, file_limit: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, ROOT / "tools/preprocess_data.py", "--tokenizer-model", tokenizer_folder]
        command += ["--output-prefix", "out", "--workers", workers, "--append-eod", *arguments]

        def limit() -> None:
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=limit,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
    journal = folder / "out.partial/journal.jsonl"
    return journal.read_bytes().count(b"result") if journal.exists() else 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MB in a plain file, a gz one and a folder of small ones; some seconds of work."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    words = ["token", "日本", "한국어", "data ", "\n", "engine", "0123", "é", "中文字", " "]
    texts = ["".join(generator.choices(words, k=generator.randrange(2_000))) for _ in range(2_000)]

    def lines(count: int) -> bytes:
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in generator.choices(texts, k=count))

    (folder / "a.jsonl").write_bytes(lines(4_000))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(1_500), 1))
    for i in range(60):
        (folder / f"small{i}.jsonl").write_bytes(lines(5))
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the corpus's pair from one quiet run with one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--tokenizer-model", tokenizer_folder]
    command += ["--output-prefix", folder / "out", "--workers", 1, "--append-eod", "--input", corpus]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    found = digest(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_gives_the_same_bytes(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str, workers: int
) -> None:
    for _ in range(2):
        code, errors = finish(start("--input", corpus, "--overwrite", workers=workers))
        assert code == 0, errors
        assert digest(tmp_path) == undisturbed
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name or "tmp" in path.name] == []


def test_the_order_of_files_is_natural_and_not_that_of_creation(start: Start, tmp_path: Path, corpus: Path) -> None:
    names = ["part1", "part2", "part10", "part011", "Part3"]
    digests = set()
    for seed in range(3):
        folder = tmp_path / f"in{seed}" / "data"
        folder.mkdir(parents=True)
        for name in random.Random(seed).sample(names, len(names)):
            (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
        assert finish(start("--input", folder, "--overwrite", "--json"))[0] == 0
        digests.add(digest(tmp_path))
        manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
        order = [Path(entry["path"]).stem for entry in manifest["inputs"]]
        assert order == ["Part3", "part1", "part2", "part10", "part011"]
    assert len(digests) == 1


def test_a_kill_at_any_moment_leaves_no_wrong_pair_and_the_next_run_ends_right(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str
) -> None:
    """SOAK_KILLS=300 in the environment makes it a soak of some minutes."""
    wanted, generator = int(os.environ.get("SOAK_KILLS", "8")), random.Random(7)
    kills = continued = ends = 0
    while kills < wanted or digest(tmp_path):
        for path in tmp_path.glob("out_text_document.*"):
            path.unlink()
        while True:
            process = start("--input", corpus, workers=generator.choice([1, 2, 4]))
            end = time.monotonic() + (generator.uniform(0.1, 2.5) if kills < wanted else 60)
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
            if code == 0 or (code == 2 and "output exists" in errors):
                break
            assert code in (-signal.SIGKILL, 1, 85), errors
        assert digest(tmp_path) == undisturbed
        assert not (tmp_path / "out.partial").exists()
        ends += 1
        if kills >= wanted:
            break
    print(f"{kills} kills, {continued} continued, {ends} ended: none wrong")
    assert continued


def is_alive(process: int) -> bool:
    """Whether it is there and no mere entry of an ended one."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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


def test_a_killed_worker_is_named_and_its_work_is_done_again(
    start: Start, tmp_path: Path, corpus: Path, undisturbed: str
) -> None:
    process = start("--input", corpus)
    wait_for(lambda: journal_lines(tmp_path) > 2)
    os.kill(family_of(process.pid)[-1], signal.SIGKILL)
    began = time.monotonic()
    code, errors = finish(process)
    assert code == 1
    assert "signal 9" in errors
    assert time.monotonic() - began < 10
    assert digest(tmp_path) is None
    code, errors = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed)
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
    for part in (tmp_path / "out.partial").glob("*.tokens"):
        os.truncate(part, part.stat().st_size // 2)
    code, errors = finish(start("--input", corpus))
    assert (code, digest(tmp_path)) == (0, undisturbed), errors


def test_existing_output_is_left_alone_until_its_successor_is_complete(
    start: Start, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "first"}\n')
    assert finish(start("--input", "in.jsonl"))[0] == 0
    first = digest(tmp_path)
    code, errors = finish(start("--input", "in.jsonl"))
    assert (code, digest(tmp_path)) == (2, first)
    assert "--overwrite" in errors
    (tmp_path / "in.jsonl").write_text('{"text": "second"}\n{"txt": 1}\n')
    assert finish(start("--input", "in.jsonl", "--overwrite"))[0] == 1
    assert digest(tmp_path) == first
    (tmp_path / "in.jsonl").write_text('{"text": "second"}\n')
    assert finish(start("--input", "in.jsonl", "--overwrite"))[0] == 0
    assert digest(tmp_path) not in (None, first)
    names = {"in.jsonl", *(f"out_text_document.{kind}" for kind in ("bin", "idx", "manifest.json"))}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_mended_file_is_not_mixed_with_work_on_the_old_one(start: Start, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"old {i} " * 200}) for i in range(9_000)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "{"]))
    assert finish(start("--input", "in.jsonl"))[0] == 1
    (tmp_path / "in.jsonl").write_text("\n".join(line.replace("old", "new") for line in lines))
    assert finish(start("--input", "in.jsonl"))[0] == 0
    mended = digest(tmp_path)
    assert finish(start("--input", "in.jsonl", "--overwrite", "--no-resume"))[0] == 0
    assert digest(tmp_path) == mended


def test_two_processes_do_not_write_one_output(start: Start, tmp_path: Path, corpus: Path, undisturbed: str) -> None:
    process = start("--input", corpus)
    wait_for(lambda: journal_lines(tmp_path) > 0)
    code, errors = finish(start("--input", corpus))
    assert code == 2
    assert "another process" in errors
    assert finish(process)[0] == 0
    assert digest(tmp_path) == undisturbed


def test_memory_does_not_grow_with_the_input(start: Start, tmp_path: Path) -> None:
    line = json.dumps({"text": "Some text of ordinary words, 日本語も少し, 123.\n" * 60}) + "\n"
    peaks = []
    for megabytes in (24, 96):
        (tmp_path / "in.jsonl").write_text(line * (megabytes * 1_000_000 // len(line.encode())))
        process = start("--input", "in.jsonl", "--overwrite")
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(resident_bytes, [process.pid, *family_of(process.pid)])))
            time.sleep(0.02)
        assert finish(process)[0] == 0
        peaks.append(peak)
    assert peaks[1] <= 1.2 * peaks[0], peaks
    assert peaks[1] < 1_000_000_000, peaks


def resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


FAULTY_ENGINE = """
import sys
sys.path.insert(0, {tools!r})
import preprocess_data
from pretrainkit.data import encoder

right = encoder.FastEncoder.encode

def wrong(self, texts):
    ids, offsets = right(self, texts)
    if any("needle" in text for text in texts):
        ids = ids ^ 1
    return ids, offsets

encoder.FastEncoder.encode = wrong
sys.exit(preprocess_data.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("line", "verify"), [(5, "sample"), (9_000, "all")])
def test_an_engine_that_gives_other_ids_is_replaced_before_anything_is_committed(
    start: Start, tmp_path: Path, tokenizer_folder: Path, line: int, verify: str
) -> None:
    lines = [json.dumps({"text": f"text {i} " * 20}) for i in range(12_000)]
    lines[line] = json.dumps({"text": "a needle in a haystack"})
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert finish(start("--input", "in.jsonl"))[0] == 0
    right = digest(tmp_path)
    command = [sys.executable, "-c", FAULTY_ENGINE.format(tools=str(ROOT / "tools")), "--input", "in.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer-model", str(tokenizer_folder), "--append-eod", "--overwrite"]
    command += ["--workers", "2", "--verify-tokens", verify, "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "tokenizers encodes instead" in result.stderr
    assert json.loads(result.stdout)[0]["tokenizer"]["engine"] == "tokenizers"
    assert digest(tmp_path) == right
