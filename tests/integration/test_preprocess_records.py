"""preprocess_data.py on every kind of record and file that people have met, read back by a reader of our own."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
Tool = Callable[..., subprocess.CompletedProcess[str]]


def read_pair(prefix: Path | str) -> list[list[int]]:
    """The documents of a pair, read from the description of the format."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    tokens = np.fromfile(f"{prefix}.bin", dtype={8: np.uint16, 4: np.int32}[code])
    lengths = np.frombuffer(index, np.int32, num_sequences, 34)
    pointers = np.frombuffer(index, np.int64, num_sequences, 34 + 4 * num_sequences)
    documents = np.frombuffer(index, np.int64, num_documents, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_documents
    assert lengths.sum() == len(tokens)
    assert documents.tolist() == list(range(num_sequences + 1))
    starts = pointers // tokens.itemsize
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture
def tool(tmp_path: Path, tokenizer_folder: Path) -> Tool:
    """Run preprocess_data.py in an empty folder, with output `out`."""

    def run(*arguments: object, tokenizer: Path = tokenizer_folder, workers: int = 1, **environment: str) -> Any:
        command = [sys.executable, ROOT / "tools/preprocess_data.py", "--tokenizer-model", tokenizer]
        command += ["--output-prefix", "out", "--workers", workers, *arguments]
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def reference(tokenizer_folder: Path) -> Callable[[str], list[int]]:
    """Ids of a text by Hugging Face tokenizers, special tokens' spelling as plain text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def lines_of(*texts: Any) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def books(result: subprocess.CompletedProcess[str]) -> tuple[int, int, int, int, int]:
    """in, out, empty, rejected, blank of the first pair, out of --json."""
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)[0]
    names = ("num_records", "num_documents", "num_empty", "num_rejected", "num_blank_lines")
    return tuple(manifest[name] for name in names)  # type: ignore[return-value]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("out")}


def test_every_document_is_its_text_and_one_eod(
    tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]]
) -> None:
    texts = [f"Document {i}, 日本語 한국어 中文 🙂\n" * (i % 7 + 1) for i in range(100)]
    (tmp_path / "in.jsonl").write_bytes(lines_of(*texts))
    assert books(tool("--input", "in.jsonl", "--append-eod", "--json")) == (100, 100, 0, 0, 0)
    assert read_pair(tmp_path / "out_text_document") == [[*reference(text), 1] for text in texts]


def test_empty_documents_are_left_out_and_counted(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of("", "hello", ""))
    assert books(tool("--input", "in.jsonl", "--append-eod", "--json")) == (3, 1, 2, 0, 0)
    (document,) = read_pair(tmp_path / "out_text_document")
    assert document[-1] == 1


BAD = {
    "missing key": (b'{"txt": "a", "id": 7}', "no key 'text'; the record's keys are 'txt', 'id'"),
    "broken": (b'{"text": "a', "broken JSON"),
    "raw tab": (b'{"text": "a\tb"}', "broken JSON"),
    "null": (b'{"text": null}', "'text' is null"),
    "number": (b'{"text": 5}', "'text' is number"),
    "list": (b'{"text": ["a", "b"]}', "'text' is list"),
    "object": (b'{"text": {"x": 1}}', "'text' is object"),
    "no object": (b'["text"]', "a JSON list where an object is needed"),
    "invalid UTF-8": (b'{"text": "a\xff"}', "invalid UTF-8: byte 0xff at byte 11"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "lone surrogate"),
    "NUL": (b'{"text": "a\\u0000b"}', "NUL"),
    "NUL byte": (b'{"text": "a"}\x00', "broken JSON"),
    "text NaN": (b'{"text": NaN}', "'text' is number"),
}


@pytest.mark.parametrize(("record", "found"), BAD.values(), ids=list(BAD))
def test_a_bad_record_stops_with_its_place_or_is_set_aside(
    tool: Tool, tmp_path: Path, record: bytes, found: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of(*"abcd") + record + b"\n" + lines_of(*"efg"))
    stopped = tool("--input", "in.jsonl")
    assert stopped.returncode == 1
    assert "in.jsonl:5" in stopped.stderr
    assert found in stopped.stderr
    assert names_in(tmp_path) == {"out.partial"}
    assert books(tool("--input", "in.jsonl", "--on-error", "skip", "--json")) == (8, 7, 0, 1, 0)
    rejected = json.loads((tmp_path / "out.rejects.jsonl").read_text())
    assert (rejected["file"], rejected["line"]) == ("in.jsonl", 5)
    assert found in rejected["found"]
    assert rejected.get("record", "").encode() == record or rejected["record_latin_1"].encode("latin-1") == record
    assert not (tmp_path / "out.partial").exists()


def test_bad_characters_can_be_replaced(tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]]) -> None:
    bad = b'{"text": "a\xff"}\n{"text": "b\\udc00"}\n{"text": "c\\u0000"}\n{"text": 4}\n'
    (tmp_path / "in.jsonl").write_bytes(lines_of("x", "y") + bad)
    result = tool("--input", "in.jsonl", "--on-error", "replace", "--json")
    assert books(result) == (6, 5, 0, 1, 0)
    assert json.loads(result.stdout)[0]["num_replaced"] == 3
    wanted = [reference(text) for text in ("x", "y", "a\ufffd", "b\ufffd", "c\ufffd")]
    assert read_pair(tmp_path / "out_text_document") == wanted


def test_blank_lines_are_no_records_and_lines_are_counted_with_them(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(
        lines_of("a") + b"\n  \r\n" + lines_of("b") + b'{"text": \n' + lines_of(*"cdef")
    )
    assert "in.jsonl:5" in tool("--input", "in.jsonl").stderr
    assert books(tool("--input", "in.jsonl", "--on-error", "skip", "--json")) == (7, 6, 0, 1, 2)


def test_the_line_of_a_bad_record_is_right_far_inside_a_file(tool: Tool, tmp_path: Path) -> None:
    lines = [lines_of("word " * 200)] * 12_000
    lines[11_000] = b'{"txt": 1}\n'
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    result = tool("--input", "in.jsonl", workers=2)
    assert "in.jsonl:11001" in result.stderr, result.stderr
    assert tool("--input", "in.jsonl", "--on-error", "skip", workers=2).returncode == 0
    assert json.loads((tmp_path / "out.rejects.jsonl").read_text())["line"] == 11_001


def test_a_job_of_an_array_that_begins_inside_a_line_counts_lines_from_the_files_start(
    tool: Tool, tmp_path: Path
) -> None:
    lines = [lines_of(f"{number} word " * 150) for number in range(9_000)]
    lines[7_000] = b'{"txt": 1}\n'
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    assert "in.jsonl:7001" in tool("--input", "in.jsonl", "--shard", "1/2").stderr
    assert tool("--input", "in.jsonl", "--shard", "1/2", "--on-error", "skip").returncode == 0
    assert json.loads((tmp_path / "out.shard-00001-of-00002.rejects.jsonl").read_text())["line"] == 7_001


def test_rows_of_a_table_are_counted_over_its_row_groups(tool: Tool, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = ["word " * 1_000_000, "word " * 1_000_000, None, "end"]  # groups of 5 MB, and yet a file of a few kB
    pq.write_table(pa.table({"text": rows}), tmp_path / "in.parquet", row_group_size=1)
    assert "in.parquet:3" in tool("--input", "in.parquet").stderr
    assert books(tool("--input", "in.parquet", "--on-error", "skip", "--json"))[:4] == (4, 3, 0, 1)
    assert json.loads((tmp_path / "out.rejects.jsonl").read_text())["line"] == 3


def test_every_wrapping_gives_the_same_pair(tool: Tool, tmp_path: Path) -> None:
    import zstandard

    texts = [f"line {i} of some text, いろは" * (i % 50) for i in range(2_000)]
    records = lines_of(*texts)
    lines = records.splitlines(keepends=True)
    parts = [b"".join(lines[i * 300 : (i + 1) * 300]) for i in range(7)]
    wrappings: dict[str, dict[str, bytes]] = {
        "plain": {"a.jsonl": records},
        "no last line end": {"a.jsonl": records.rstrip(b"\n")},
        "byte order mark": {"a.jsonl": b"\xef\xbb\xbf" + records},
        "carriage returns": {"a.jsonl": records.replace(b"\n", b"\r\n")},
        "gz": {"a.jsonl.gz": gzip.compress(records)},
        "gz of several members": {"a.jsonl.gz": b"".join(gzip.compress(part) for part in parts)},
        "seven gz": {f"part{i}.jsonl.gz": gzip.compress(part) for i, part in enumerate(parts, 5)},
        "zst": {"a.jsonl.zst": zstandard.compress(records)},
        "zst of several frames": {"a.jsonl.zst": b"".join(zstandard.compress(part) for part in parts)},
        "xz": {"a.json.xz": lzma.compress(records)},
        "bz2": {"a.jsonl.bz2": bz2.compress(records)},
        "mixed folder": {
            f"part{i}.jsonl{'.gz' * (i % 2)}": gzip.compress(part) if i % 2 else part for i, part in enumerate(parts, 5)
        },
        "gz without its name": {"a.jsonl": gzip.compress(records)},
    }
    found = {}
    for number, (name, files) in enumerate(wrappings.items()):
        folder = tmp_path / f"in{number}"
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        result = tool("--input", folder.name, "--append-eod", "--overwrite", workers=2)
        assert result.returncode == 0, f"{name}: {result.stderr}"
        found[name] = [(tmp_path / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]
    assert {name for name in found if found[name] != found["plain"]} == set()


def test_parquet_arrow_and_text_are_read(tool: Tool, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    texts = [f"row {i} with text" for i in range(500)]
    table = pa.table({"id": list(range(500)), "text": texts})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=64)
    Dataset(table).save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n\n")
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts[:40]):
        (tmp_path / f"files/{i}.txt").write_text(text)
    pairs = {}
    for name in ("in.parquet", "saved", "in.txt"):
        result = tool("--input", name, "--json", "--overwrite", workers=2)
        assert books(result)[:2] == (500, 500), name
        pairs[name] = read_pair(tmp_path / "out_text_document")
    assert pairs["in.parquet"] == pairs["saved"] == pairs["in.txt"]
    assert books(tool("--input", "files", "--text-documents", "file", "--json", "--overwrite"))[:2] == (40, 40)
    assert read_pair(tmp_path / "out_text_document") == pairs["in.txt"][:40]
    missing = tool("--input", "in.parquet", "--json-keys", "body", "--overwrite")
    assert (missing.returncode, "id, text" in missing.stderr) == (2, True)


@pytest.mark.parametrize("suffix", ["gz", "zst", "xz", "bz2"])
def test_a_cut_archive_fails_even_when_bad_records_are_skipped(tool: Tool, tmp_path: Path, suffix: str) -> None:
    import zstandard

    pack = {"gz": gzip.compress, "zst": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress}[suffix]
    data = pack(lines_of(*(f"text {i}" for i in range(20_000))))
    (tmp_path / f"in.jsonl.{suffix}").write_bytes(data[:-200])
    result = tool("--input", f"in.jsonl.{suffix}", "--on-error", "skip")
    assert result.returncode == 1
    assert f"in.jsonl.{suffix}: cut or damaged" in result.stderr
    assert names_in(tmp_path) == {"out.partial"}


def test_several_keys_give_a_pair_each(tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]]) -> None:
    records = [{"title": f"T{i}" * (i % 2), "text": f"body {i}"} for i in range(10)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    result = tool("--input", "in.jsonl", "--json-keys", "title", "text", "--json")
    assert result.returncode == 0
    assert [manifest["num_documents"] for manifest in json.loads(result.stdout)] == [5, 10]
    assert read_pair(tmp_path / "out_title_document") == [reference(f"T{i}") for i in range(1, 10, 2)]
    assert read_pair(tmp_path / "out_text_document") == [reference(record["text"]) for record in records]


@pytest.mark.parametrize(
    ("policy", "documents"), [("plain", 3), ("encode", 3), ("error", 2)], ids=["plain", "encode", "error"]
)
def test_special_tokens_spelled_in_a_text_follow_the_policy(
    tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]], policy: str, documents: int
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of("a", "x<|end|>y", "b"))
    result = tool("--input", "in.jsonl", "--special-tokens-in-text", policy, "--on-error", "skip", "--json")
    assert books(result)[1] == documents
    found = read_pair(tmp_path / "out_text_document")
    assert {"plain": found[1] == reference("x<|end|>y"), "encode": found[1].count(1) == 1, "error": True}[policy]
    assert found[-1] == reference("b")


@pytest.mark.parametrize("template", ["none", "bos", "bos and eos"])
def test_a_tokenizers_template_adds_nothing(
    tool: Tool, tmp_path: Path, tokenizer_folder: Path, reference: Callable[[str], list[int]], template: str
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    single = {"none": "$A", "bos": "<|begin|> $A", "bos and eos": "<|begin|> $A <|end|>"}[template]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((tokenizer_folder / "tokenizer_config.json").read_text())
    texts = [f"some longer text number {i}" for i in range(10)]
    (tmp_path / "in.jsonl").write_bytes(lines_of(*texts))
    assert tool("--input", "in.jsonl", "--append-eod", tokenizer=folder).returncode == 0
    assert read_pair(tmp_path / "out_text_document") == [[*reference(text), 1] for text in texts]
    assert tool("--input", "in.jsonl", "--add-bos", "--overwrite", tokenizer=folder).returncode == 0
    assert read_pair(tmp_path / "out_text_document") == [[0, *reference(text)] for text in texts]


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(65_498, "uint16"), (65_499, "int32"), (65_535, "int32"), (65_536, "int32"), (70_000, "int32")],
)
def test_the_dtype_follows_the_largest_id_as_megatrons_does(
    tool: Tool, tmp_path: Path, tokenizer_folder: Path, largest: int, dtype: str
) -> None:
    description = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description["model"]["vocab"]["<|largest|>"] = largest
    description["added_tokens"].append({"id": largest, "content": "<|largest|>", "special": True, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "in.jsonl").write_bytes(lines_of("a<|largest|>b"))
    arguments = ("--input", "in.jsonl", "--special-tokens-in-text", "encode")
    result = tool(*arguments, "--json", tokenizer=tmp_path / "tokenizer.json")
    assert json.loads(result.stdout)[0]["dtype"] == dtype, result.stderr
    assert read_pair(tmp_path / "out_text_document")[0][1] == largest
    forced = tool(*arguments, "--overwrite", "--dtype", "uint16", tokenizer=tmp_path / "tokenizer.json")
    assert forced.returncode == (0 if largest < 65_536 else 1)
    assert largest < 65_536 or f"token id {largest} does not fit in uint16" in forced.stderr


WRONG = {
    "no EOS": (["--append-eod"], "--eod-token"),
    "unknown EOD": (["--append-eod", "--eod-token", "<nope>"], "<nope>"),
    "sentences": (["--split-sentences"], "--split-sentences"),
    "no input": (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
    "no workers": (["--workers", "0"], "--workers"),
    "shard": (["--shard", "3/3"], "--shard"),
}


@pytest.mark.parametrize(("arguments", "named"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_request_ends_before_any_work(
    tool: Tool, tmp_path: Path, tokenizer_folder: Path, arguments: list[str], named: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of("a"))
    result = tool("--input", "in.jsonl", *arguments, tokenizer=tokenizer_folder / "tokenizer.json")
    assert result.returncode == 2
    assert named in result.stderr
    assert names_in(tmp_path) == set()


def test_a_tokenizer_that_fastokens_refuses_is_encoded_by_tokenizers(tool: Tool, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in "abcdefgh")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_bytes(lines_of("abc", "fed cab"))
    result = tool("--input", "in.jsonl", tokenizer=tmp_path / "tokenizer.json", workers=2)
    assert result.returncode == 0
    assert "tokenizers encodes instead" in result.stderr
    assert read_pair(tmp_path / "out_text_document") == [tokenizer.encode(text).ids for text in ("abc", "fed cab")]


def test_a_whole_run_can_be_compared_with_tokenizers(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of(*(f"text {i}" for i in range(3_000))))
    result = tool("--input", "in.jsonl", "--verify-tokens", "all", "--json")
    assert books(result)[1] == 3_000
    tokenizer = json.loads(result.stdout)[0]["tokenizer"]
    assert (tokenizer["engine"], tokenizer["verified"]) == ("fastokens", "all")


def test_long_documents_are_encoded_whole_or_rejected_by_size(
    tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of("a" * 5_000_000, *(f"small {i}" for i in range(1_000))))
    assert tool("--input", "in.jsonl", workers=2).returncode == 0
    assert read_pair(tmp_path / "out_text_document")[0] == reference("a" * 5_000_000)
    result = tool("--input", "in.jsonl", "--max-doc-bytes", 1_000_000, "--on-error", "skip", "--overwrite", "--json")
    assert books(result) == (1_001, 1_000, 0, 1, 0)


def test_one_pair_per_input_file(tool: Tool, tmp_path: Path, reference: Callable[[str], list[int]]) -> None:
    for i in range(5):
        path = tmp_path / f"in/sub{i % 2}/part{i}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(lines_of(f"file {i}", "more")))
    result = tool("--input", "in", "--per-file", "--output-prefix", "made/", workers=2)
    assert result.returncode == 0, result.stderr
    for i in range(5):
        assert read_pair(tmp_path / f"made/sub{i % 2}/part{i}_text_document") == [
            reference(f"file {i}"),
            reference("more"),
        ]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["sub0", "sub1"]


def test_jobs_of_an_array_joined_in_order_equal_one_run(tool: Tool, tmp_path: Path) -> None:
    def inspect(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools/inspect_data.py"), *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    texts = [f"text {i} " * 30 for i in range(50_000)]
    (tmp_path / "a.jsonl").write_bytes(lines_of(*texts))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(*texts[:100])))
    arguments = ("--input", "a.jsonl", "b.jsonl.gz", "--append-eod")
    assert tool(*arguments).returncode == 0
    for i in range(3):
        environment = {"SLURM_ARRAY_TASK_ID": str(i + 4), "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "6"}
        result = tool(*arguments, "--shard", "array", **environment)
        assert result.returncode == 0, result.stderr
        if i == 1:  # the folder is refused while a part is missing
            alone = tmp_path / "alone"
            alone.mkdir()
            for path in tmp_path.glob("out.shard-*"):
                (alone / path.name).symlink_to(path)
            for command in (["count", "alone"], ["verify", "alone"], ["blend", "alone", "--output", "b.json"]):
                refused = inspect(*command)
                assert refused.returncode == 2 and "1 of 3 parts of an array are missing: 2" in refused.stderr
    shards = sorted(tmp_path.glob("out.shard-*.bin"))
    assert len(shards) == 3
    assert min(shard.stat().st_size for shard in shards) > 0
    assert inspect("merge", "--output-prefix", "whole", "--input", *shards).returncode == 0
    for kind in ("bin", "idx"):
        assert (tmp_path / f"whole.{kind}").read_bytes() == (tmp_path / f"out_text_document.{kind}").read_bytes()
    one, whole = (
        json.loads((tmp_path / f"{name}.manifest.json").read_text()) for name in ("out_text_document", "whole")
    )
    for name in ("num_records", "num_documents", "num_tokens", "bin_crc32", "num_input_bytes"):
        assert one[name] == whole[name], name
    # A file that grew between two jobs is cut elsewhere: records would be lost or doubled.
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(lines_of(*texts[:20_000]))
    refused = tool(*arguments, "--shard", "1/3")
    assert refused.returncode == 2 and "output exists" in refused.stderr
    assert tool(*arguments, "--shard", "1/3", "--overwrite").returncode == 0
    refused = inspect("merge", "--output-prefix", "whole", "--overwrite", "--input", *shards)
    assert refused.returncode == 2 and "are parts of different runs" in refused.stderr
