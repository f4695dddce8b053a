"""preprocess_data.py by any number of workers, over old output, beside others: one result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preprocess_runs import JOURNAL, ROOT, Start, digest, family_of, finish, journal_lines, wait_for

pytestmark = pytest.mark.integration


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


def test_existing_output_is_left_alone_until_its_successor_is_complete(
    start: Start, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "first"}\n')
    assert finish(start("--input", "in.jsonl"))[0] == 0
    first = digest(tmp_path)
    code, errors = finish(start("--input", "in.jsonl"))  # as when a job array is submitted again whole
    assert (code, digest(tmp_path)) == (0, first)
    assert "all of it is written already" in errors
    for other in (["--special-tokens-in-text", "encode"], []):
        if not other:
            (tmp_path / "in.jsonl").write_text('{"text": "f1rst"}\n')  # of the same size
        code, errors = finish(start("--input", "in.jsonl", *other))
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


def test_output_next_to_its_input_is_not_read_by_the_next_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    (tmp_path / "b.csv").write_text("a,b\n")
    assert finish(start("--input", "."))[0] == 1  # it leaves out.partial
    for output in ("out", "other"):
        code, errors = finish(start("--input", ".", "--output-prefix", output, "--on-error", "skip"))
        assert code == 0 and "1 in input folders are not read, as their suffix is unknown: b.csv" in errors
    assert (tmp_path / "out_text_document.bin").read_bytes() == (tmp_path / "other_text_document.bin").read_bytes()
    manifest = json.loads((tmp_path / "other_text_document.manifest.json").read_text())
    assert [entry["path"] for entry in manifest["inputs"]] == ["a.jsonl"]
    assert (manifest["num_files_left_out"], manifest["num_rejected"]) == (1, 1)


@pytest.mark.parametrize("change", ["grows", "is replaced"])
def test_an_input_that_changes_while_it_is_read_is_named_and_not_committed(
    start: Start, tmp_path: Path, change: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "old"}\n' * 99)
    process = start("--input", "in.jsonl", workers=1)
    wait_for((tmp_path / "out.partial/request.json").exists)
    process.send_signal(signal.SIGSTOP)
    if change == "grows":
        with source.open("a") as file:
            file.write('{"text": "new"}\n')
    else:
        (tmp_path / "new.jsonl").write_text('{"text": "new"}\n' * 99)
        (tmp_path / "new.jsonl").replace(source)
    process.send_signal(signal.SIGCONT)
    code, errors = finish(process)
    assert code == 1 and "in.jsonl: the file changed while it was read" in errors
    assert digest(tmp_path) is None
    assert finish(start("--input", "in.jsonl", workers=1))[0] == 0
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert manifest["num_documents"] == 99 + (change == "grows")


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
    process.send_signal(signal.SIGSTOP)  # so that it is still at work, however long the other takes to start
    code, errors = finish(start("--input", corpus))
    process.send_signal(signal.SIGCONT)
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
from pretrainkit.data.tokens import encoder

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


def test_a_run_that_had_to_take_tokenizers_is_continued_with_it(
    start: Start, tmp_path: Path, tokenizer_folder: Path
) -> None:
    lines = [json.dumps({"text": f"a needle {i} " * 20}) for i in range(60_000)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-c", FAULTY_ENGINE.format(tools=str(ROOT / "tools")), "--input", "in.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer-model", str(tokenizer_folder), "--append-eod", "--workers", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: journal_lines(tmp_path) > 0 and b"engine" in (tmp_path / JOURNAL).read_bytes())
        process.kill()
    code, errors = finish(start("--input", "in.jsonl"))
    assert code == 0, errors
    assert "continuing unfinished work" in errors
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert manifest["tokenizer"]["engine"] == "tokenizers"


def test_a_place_that_can_not_be_written_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    code, errors = finish(start("--input", "in.jsonl", "--output-prefix", "in.jsonl/x"))
    assert code == 2
    assert "in.jsonl/x.partial: can't be written: Not a directory" in errors
