"""Inputs that aren't what they claim, and records that nothing is left of: refused in words, before work starts."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import preprocess_runs
import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
RECORDS = b'{"text": "one"}\n{"text": "two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"
PAGE = b"<!DOCTYPE html>\n<html><body>404</body></html>\n"
REFUSED = {
    **{f"empty {kind}": (f"a.jsonl.{kind}", b"", f"empty, which no {kind} is") for kind in ("gz", "zst", "xz", "bz2")},
    "page as gz": ("a.txt.gz", PAGE, "not gz: it begins with b'<!DOCTYPE html>"),
    "records as zst": ("a.jsonl.zst", RECORDS, "not zst"),
    "pointer as gz": ("a.jsonl.gz", POINTER, "a Git LFS pointer"),
    "pointer as text": ("a.txt", POINTER, "a Git LFS pointer"),
    "pointer as Parquet": ("a.parquet", POINTER, "a Git LFS pointer"),
    "pointer in gz": ("a.txt.gz", gzip.compress(POINTER), "a Git LFS pointer"),
    "gz in gz": ("a.jsonl.gz", gzip.compress(gzip.compress(RECORDS)), "gz inside gz"),
    "xz in bz2": ("a.jsonl.bz2", bz2.compress(lzma.compress(RECORDS)), "xz inside bz2"),
    "zip": ("a.jsonl", b"PK\x03\x04rest", "an archive of the kind zip"),
    "lz4": ("a.jsonl", b"\x04\x22\x4d\x18rest", "an archive of the kind lz4"),
    "tar in gz": ("a.txt.gz", gzip.compress(b"x" * 257 + b"ustar"), "an archive of the kind tar"),
    "array on a line": ("a.json", b'[{"text": "a"}, {"text": "b"}]', "a JSON array"),
    "array over lines": ("a.json.gz", gzip.compress(b'[\n{"text": "a"}\n]'), "jq -c '.[]' a.json.gz"),
    "object over lines": ("a.json", b'{\n  "text": "a"\n}\n', "JSON objects over several lines"),
}


def run(folder: Path, tokenizer: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and stderr of preprocess_data.py."""
    return preprocess_runs.finish(preprocess_runs.start(folder, tokenizer, *arguments, workers=1))


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out_text_document.manifest.json").read_text())


def test_what_is_not_what_its_name_promises_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    for number, (name, data, _) in enumerate(REFUSED.values()):
        (tmp_path / f"in{number}").mkdir()
        (tmp_path / f"in{number}" / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.jsonl")
    code, errors = run(tmp_path, tokenizer_folder, "--input", *(f"in{i}" for i in range(len(REFUSED))), "pipe.jsonl")
    assert code == 2
    *problems, pipe = sorted(errors.split("\n- ")[1:], key=preprocess_key)
    assert len(problems) == len(REFUSED), errors
    for problem, (name, (file, _, found)) in zip(problems, REFUSED.items(), strict=True):
        assert f"/{file}: " in problem and found in problem and "What to do: " in problem, f"{name}: {problem}"
    assert "pipe.jsonl: a pipe or a device" in pipe
    assert not (tmp_path / "out.partial").exists()


def preprocess_key(problem: str) -> tuple[int, str]:
    """Problems in the order of their folders, then the others."""
    folder = problem.split("/")[0]
    return (int(folder[2:]), "") if folder.startswith("in") else (len(REFUSED), problem)


def test_a_page_of_html_that_is_text_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PAGE)
    code, errors = run(tmp_path, tokenizer_folder, "--input", "a.txt")
    assert (code, "1 text files begin as HTML pages, such as a.txt" in errors) == (0, True)


def test_files_of_pzstd_are_read(tokenizer_folder: Path, tmp_path: Path) -> None:
    import zstandard

    skipped = struct.pack("<II", 0x184D2A50, 4) + b"size"
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(skipped + zstandard.compress(part) for part in (RECORDS, RECORDS)))
    assert run(tmp_path, tokenizer_folder, "--input", "a.jsonl.zst")[0] == 0
    assert manifest(tmp_path)["num_documents"] == 4


def test_a_cut_archive_says_how_much_text_is_readable(tokenizer_folder: Path, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4 + os.urandom(100_000)
    text = b"".join(json.dumps({"text": data[i : i + 500].hex()}).encode() + b"\n" for i in range(0, len(data), 500))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text)[:-500])
    code, errors = run(tmp_path, tokenizer_folder, "--input", "a.jsonl.gz")
    readable = int(errors.split(" bytes of text can be read")[0].split()[-1])
    assert code == 1
    assert 0.9 * len(text) < readable < len(text)


def test_python_s_own_nan_and_infinity_are_read(tokenizer_folder: Path, tmp_path: Path) -> None:
    records = [{"text": "one", "score": value} for value in (float("nan"), float("inf"), -float("inf"), 10**400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(tmp_path, tokenizer_folder, "--input", "a.jsonl")[0] == 0
    assert manifest(tmp_path)["num_documents"] == 4


def test_binary_columns_and_strings_that_are_no_utf_8_are_records_like_others(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array([b"one", "日本".encode(), b"bad\xff", None], pa.binary())
    pq.write_table(pa.table({"text": values}), tmp_path / "binary.parquet")
    strings = pa.Array.from_buffers(pa.string(), 4, values.buffers(), null_count=1)
    pq.write_table(pa.table({"text": strings}), tmp_path / "string.parquet")
    for name in ("binary", "string"):
        code, errors = run(tmp_path, tokenizer_folder, "--input", f"{name}.parquet", "--overwrite")
        assert (code, "invalid UTF-8: byte 0xff at byte 3" in errors) == (1, True), errors
        arguments = ("--input", f"{name}.parquet", "--overwrite", "--on-error", "replace")
        assert run(tmp_path, tokenizer_folder, *arguments)[0] == 0
        found = manifest(tmp_path)
        assert [found[f"num_{kind}"] for kind in ("documents", "rejected", "replaced")] == [3, 1, 1]


BAD_HALF = b'{"text": "one"}\n{"txt": "two"}\n' * 10


def test_a_run_of_which_nothing_is_left_fails_and_names_the_key(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "one"}\n' * 10)
    code, errors = run(tmp_path, tokenizer_folder, "--input", "a.jsonl")
    assert (code, "name the text's key or column: --json-keys" in errors) == (1, True)
    code, errors = run(tmp_path, tokenizer_folder, "--input", "a.jsonl", "--on-error", "skip")
    assert (code, "10 of 10 records are bad; the first: a.jsonl:1: no key 'text'" in errors) == (1, True)
    assert not (tmp_path / "out_text_document.idx").exists()
    assert run(tmp_path, tokenizer_folder, "--input", "a.jsonl", "--json-keys", "content")[0] == 0


def test_the_share_of_bad_records_has_a_limit_that_can_be_raised(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD_HALF)
    arguments = ("--input", "a.jsonl", "--on-error", "skip", "--max-rejected")
    code, errors = run(tmp_path, tokenizer_folder, *arguments, "49%")
    assert (code, "10 of 20 records are bad" in errors, "--max-rejected" in errors) == (1, True, True)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]
    code, errors = run(tmp_path, tokenizer_folder, *arguments, "0.5")
    assert (code, "continuing unfinished work: 1 pieces are done" in errors) == (0, True)
    assert len((tmp_path / "out.rejects.jsonl").read_bytes().splitlines()) == 10
    assert run(tmp_path, tokenizer_folder, *arguments, "2")[0] == 2


@pytest.mark.parametrize(("tool", "output"), [("make_shards", ["--all"]), ("pack_dataset", ["--sequence_length", "4"])])
def test_shards_and_packed_sets_have_the_same_limits(
    tokenizer_folder: Path, tmp_path: Path, tool: str, output: list[str]
) -> None:
    names = {"make_shards": ("input_dir", "model_id"), "pack_dataset": ("input", "tokenizer_model")}[tool]
    (tmp_path / "a.jsonl").write_bytes(BAD_HALF)
    command = [sys.executable, ROOT / f"tools/{tool}.py", f"--{names[0]}", "a.jsonl", f"--{names[1]}", tokenizer_folder]
    command += ["--output_dir", "out", "--on_error", "skip", *output]
    for flags, found in (
        (["--max_rejected", "1%"], "10 of 20 records are bad"),
        ([f"--{'json_key' if tool == 'make_shards' else 'text_column'}", "x"], "20 of 20 records are bad"),
    ):
        words = [str(word) for word in command + flags]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, found in done.stderr) == (1, True), done.stderr
        assert not [*tmp_path.glob("out/*.tar"), *tmp_path.glob("out/*.arrow")]


def test_a_pair_of_one_document_is_shown_and_asserts_may_be_off(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    for words in (
        ("preprocess_data.py", "--input", "a.jsonl", "--output-prefix", "out", "--tokenizer-model", tokenizer_folder),
        ("inspect_data.py", "show", "out_text_document"),
    ):
        command = [sys.executable, "-OO", ROOT / "tools" / words[0], *words[1:]]
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "--- document 0, 2 tokens\none\n--- document 1, 3 tokens\ntwo\n"


@pytest.mark.parametrize(("meaning", "count"), [("plain", 2), ("encode", 2), ("error", 0)])
def test_texts_that_spell_special_tokens_are_counted(
    tokenizer_folder: Path, tmp_path: Path, meaning: str, count: int
) -> None:
    texts = ["a<|end|>", "plain", "<|begin|><|end|>", "<|endless|>"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ("--input", "a.jsonl", "--special-tokens-in-text", meaning, "--on-error", "skip")
    assert run(tmp_path, tokenizer_folder, *arguments)[0] == 0
    found = manifest(tmp_path)
    assert (found["num_spelled"], found["num_rejected"]) == (count, 2 - count)
