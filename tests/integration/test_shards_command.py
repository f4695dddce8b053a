"""make_shards.py as people run it, read by plain webdataset."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import webdataset
from transformers import AutoTokenizer

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
NO_ARRAY = dict.fromkeys(("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID"), "")


def make_shards(*words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "tools/make_shards.py", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **NO_ARRAY, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done


def read(folder: Path) -> list[dict[str, Any]]:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode())


@pytest.fixture
def texts(tmp_path: Path, jsonl_file: Path) -> Path:
    """Three text files, one of them empty; blank lines, Korean, a dot at a line's start."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [line for record in jsonl_file.read_text().splitlines() for line in json.loads(record)["text"].split("\n")]
    (folder / "a.txt").write_text("\n".join([*lines[:300], "", ".안녕하세요 세계", "  "]), encoding="utf-8")
    (folder / "b.txt").write_text("")
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n".join(lines[300:500]).encode()))
    return folder


def test_shards_are_what_the_loop_over_lines_would_make(texts: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    out = tmp_path / "out"
    for task in range(3):
        make_shards(
            "--input_dir", texts, "--output_dir", out, "--model_id", tokenizer_folder, SLURM_ARRAY_TASK_ID=str(task)
        )
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".json") == [
        f"shard-0000{number}.json" for number in range(3)
    ]
    assert not (out / "shard-00001.tar").exists(), "an empty file has a record and no tar"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    wanted = []
    for shard, name in ((0, "a.txt"), (2, "c.txt.gz")):
        data = (texts / name).read_bytes()
        content = (gzip.decompress(data) if name.endswith("gz") else data).decode()
        for number, line in enumerate(content.split("\n")):
            if line.strip():
                wanted.append((f"sample_{shard}_{number:08d}", tokenizer(line)["input_ids"], line))
    found = [(sample["__key__"], sample["token_ids.json"], sample["text.txt"]) for sample in read(out)]
    assert found == wanted
    record = json.loads((out / "shard-00000.json").read_text())
    assert record["num_records"] == record["num_samples"] + record["num_empty"] + record["num_rejected"]
    assert record["num_tokens"] == sum(len(ids) for key, ids, _ in wanted if key.startswith("sample_0_"))


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix != ".json"
    }


def test_workers_and_compression_leave_the_bytes_as_they_are(
    texts: Path, tmp_path: Path, tokenizer_folder: Path, jsonl_file: Path
) -> None:
    common = ["--model_id", tokenizer_folder, "--all", "--append_eod", "--ids_format", "npy", "--num_shards", 2]
    make_shards("--input_dir", jsonl_file, "--output_dir", tmp_path / "one", "--workers", 1, *common)
    packed = tmp_path / "reference.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl_file.read_bytes()))
    make_shards("--input_dir", jsonl_file, "--output_dir", tmp_path / "two", "--workers", 2, *common)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    make_shards("--input_dir", packed, "--output_dir", tmp_path / "gz", "--workers", 1, *common)
    streams = [[sample["token_ids.npy"].tolist() for sample in read(tmp_path / name)] for name in ("one", "gz")]
    assert streams[0] == streams[1]
    assert len(streams[0]) == 40
    assert all(ids[-1] == 1 and ids.count(1) == 1 for ids in streams[0])


def test_a_rerun_makes_what_is_missing_and_nothing_else(texts: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    out = tmp_path / "out"
    common = ["--input_dir", texts, "--output_dir", out, "--model_id", tokenizer_folder]
    make_shards(*common, "--shard_id", 0)
    status = make_shards(*common, "--status", code=1)
    assert "missing: 1-2" in status.stdout
    before = (out / "shard-00000.tar").stat()
    make_shards(*common, "--all")
    after = (out / "shard-00000.tar").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "3 of 3" in make_shards(*common, "--status").stdout
    refused = make_shards(*common, "--shard_id", 0, "--no-text", code=2)
    assert "has_text" in refused.stderr
    (texts / "d.txt").write_text("one more\n")
    refused = make_shards(*common, "--shard_id", 3, code=2)
    assert "num_shards" in refused.stderr
    (texts / "d.txt").unlink()
    (texts / "a.txt").write_text("changed\n")
    assert "has changed" in make_shards(*common, "--shard_id", 0, code=2).stderr
    make_shards(*common, "--shard_id", 0, "--overwrite")
    assert read(out)[0]["text.txt"] == "changed"
    # The same files by another name.
    moved = texts.rename(tmp_path / "moved")
    link = tmp_path / "link"
    link.symlink_to(moved)
    for folder in (moved, link, os.path.relpath(moved, REPOSITORY)):
        again = make_shards("--input_dir", folder, *common[2:], "--all")
        assert again.stderr.count("complete already") == 3


def test_damaged_shards_are_found_and_made_again(texts: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    out = tmp_path / "out"
    words = ["--input_dir", texts, "--output_dir", out, "--model_id", tokenizer_folder]
    make_shards(*words, "--all")
    tars = out / "shard-00000.tar", out / "shard-00002.tar"
    whole = [tar.read_bytes() for tar in tars]
    verify = [sys.executable, "tools/inspect_data.py", "verify", str(out)]
    assert "good" in subprocess.run(verify, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    tars[0].write_bytes(whole[0].replace(b"[1", b"[2", 1))
    assert "shards are complete" in make_shards(*words, "--status").stdout  # its size is right
    found = subprocess.run(verify, cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 1 and "shard-00000.tar holds other bytes than were written" in found.stdout
    assert "damaged: 0" in make_shards(*words, "--status", "--verify", code=1).stdout
    tars[1].write_bytes(whole[1][:10_240])
    assert "1 of 3 shards are complete\ndamaged: 0,2" in make_shards(*words, "--status", "--verify", code=1).stdout
    done = make_shards(*words, "--all", "--verify")
    assert "shard-00002.tar has 10240 bytes, its record says" in done.stderr
    assert [tar.read_bytes() for tar in tars] == whole
    tars[1].unlink()
    make_shards(*words, "--all")
    assert [tar.read_bytes() for tar in tars] == whole


def test_files_that_grew_are_not_cut_as_before(texts: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    common = ["--input_dir", texts, "--output_dir", tmp_path / "out", "--model_id", tokenizer_folder]
    common += ["--num_shards", 2]
    make_shards(*common, "--shard_id", 0)
    with (texts / "a.txt").open("a") as file:
        file.write("more\n" * 1000)
    for task in (["--shard_id", 1], ["--shard_id", 1, "--overwrite"], ["--status"], ["--all"]):
        refused = make_shards(*common, *task, code=2)
        assert "files had other sizes, so records belong to other shards now" in refused.stderr


def test_a_bad_record_stops_or_is_set_aside(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "good"}\n\n{"txt": "bad"}\n{"text": ""}\n{"text": "more"}\n')
    common = ["--input_dir", source, "--model_id", tokenizer_folder, "--shard_id", 0, "--output_dir"]
    stopped = make_shards(*common, tmp_path / "out", code=1)
    assert "in.jsonl:3" in stopped.stderr and "'text'" in stopped.stderr
    assert list((tmp_path / "out").iterdir()) == []
    done = make_shards(*common, tmp_path / "out", "--on_error", "skip")
    assert "4 records in = 2 samples + 1 empty + 1 rejected" in done.stdout
    assert [sample["__key__"] for sample in read(tmp_path / "out")] == ["sample_0_00000000", "sample_0_00000004"]
    assert json.loads((tmp_path / "out" / "shard-00000.rejects.jsonl").read_text())["line"] == 3


def test_a_killed_task_leaves_no_shard_and_the_next_one_completes_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"line {number} of a text that takes some time\n" for number in range(150_000)))
    common = ["--input_dir", source, "--model_id", tokenizer_folder, "--shard_id", 0, "--verify_tokens", "off"]
    make_shards(*common, "--output_dir", tmp_path / "whole", "--workers", 1)
    out = tmp_path / "out"
    words = [sys.executable, "tools/make_shards.py", *map(str, common), "--output_dir", str(out), "--workers", "1"]
    for kill_at in (0.3, 0.6, 0.9, 1.2):
        process = subprocess.Popen(words, cwd=REPOSITORY, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(kill_at)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (out / "shard-00000.json").exists():
            assert digests(out).items() >= digests(tmp_path / "whole").items()
    make_shards(*common, "--output_dir", out, "--workers", 1)
    assert digests(out) == digests(tmp_path / "whole"), "the shard is whole, and no temporary file is left"


def test_workers_end_with_a_killed_task(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"line {number} of a text that takes some time\n" for number in range(1_000_000)))
    words = ["--input_dir", source, "--output_dir", tmp_path / "out", "--model_id", tokenizer_folder, "--shard_id", 0]
    command = [sys.executable, "tools/make_shards.py", *map(str, words), "--workers", "2", "--verify_tokens", "off"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    parent, children = psutil.Process(process.pid), []
    while len(children) < 3:  # the fork server and its workers
        assert process.poll() is None
        children = parent.children(recursive=True)
        time.sleep(0.02)
    time.sleep(0.3)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_stripes_are_set_where_there_is_lustre(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "in.txt").write_text("one line\n")
    lfs = tmp_path / "bin" / "lfs"
    lfs.parent.mkdir()
    lfs.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    lfs.chmod(0o755)
    words = ["--input_dir", tmp_path / "in.txt", "--output_dir", tmp_path / "out", "--model_id", tokenizer_folder]
    make_shards(*words, "--all", "--stripe", 8, PATH=f"{lfs.parent}:{os.environ['PATH']}")
    assert (tmp_path / "called").read_text().split() == ["setstripe", "-c", "8", str(tmp_path / "out")]
    assert "no effect" in make_shards(*words, "--all", "--stripe", 8).stderr


@pytest.mark.parametrize("fails_at", [None, 1], ids=["all-sent", "second-refused"])
def test_more_shards_than_an_array_may_have_are_sent_in_several(tmp_path: Path, fails_at: int | None) -> None:
    log = tmp_path / "log"
    for name, text in (
        ("scontrol", "echo 'MaxArraySize            = 1001'"),
        ("python", f'[ "$(cat {log} 2>/dev/null | wc -l)" = "{fails_at}" ] && exit 1; echo "$*" >> {log}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["scripts/submit_shards.sh", "2500", "--input_dir", "a b"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    sent = []
    for line in log.read_text().splitlines():
        words = line.split()
        assert "a b" in line and words[words.index("--executor") + 1] == "slurm"
        first, last = map(int, words[words.index("--array") + 1].split("-"))
        assert last <= 1000
        offset = int(words[words.index("--shard_offset") + 1])
        sent += range(offset + first, offset + last + 1)
    assert sent == list(range(2500 if fails_at is None else 1001))
    assert done.returncode == (0 if fails_at is None else 1)
    assert fails_at is None or "1001 shards before them were" in done.stderr


def test_an_array_may_begin_with_another_number(tmp_path: Path, texts: Path, tokenizer_folder: Path) -> None:
    words = ["--input_dir", texts, "--output_dir", tmp_path / "out", "--model_id", tokenizer_folder]
    make_shards(*words, "--shard_offset", -100, SLURM_ARRAY_TASK_ID="100")
    assert (tmp_path / "out" / "shard-00000.json").is_file()
    assert "--shard_id" in make_shards(*words, "--shard_offset", -100, code=2, SLURM_ARRAY_TASK_ID="99").stderr
