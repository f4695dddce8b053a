"""Sources, blocks, work items and job arrays: which bytes are read by whom."""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.data.job_array import parse_shard
from pretrainkit.data.readers.compressed import Compressed, PieceHash
from pretrainkit.data.readers.inputs import resolve_inputs, stem_of
from pretrainkit.data.readers.jsonl import JsonLines
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import BLOCK_BYTES, Block, FileRange, RangeCounts, Source
from pretrainkit.data.readers.work_items import WorkItem, cut, shard
from pretrainkit.errors import DataError, RequestError

RECORD = b'{"text": "a"}\n'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], None]:
    monkeypatch.chdir(tmp_path)

    def create(name: str, data: bytes = RECORD) -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)

    return create


def test_folders_globs_and_files_mix_in_natural_order(write: Callable[..., None]) -> None:
    for name in (
        "b/10.jsonl",
        "b/9.jsonl.gz",
        "b/deep/1.txt",
        "b/.hidden.jsonl",
        "b/README.md",
        "a2.jsonl",
        "a10.jsonl",
    ):
        write(name, gzip.compress(RECORD) if name.endswith("gz") else RECORD)
    found = resolve_inputs(("b", "a*.jsonl"))
    assert [source.path for source in found] == ["a2.jsonl", "a10.jsonl", "b/9.jsonl.gz", "b/10.jsonl", "b/deep/1.txt"]
    assert [stem_of(source) for source in found] == ["a2", "a10", "9", "10", "deep/1"]
    assert [source.is_stream for source in found] == [False, False, True, False, False]


REFUSED = {
    "absent": (("nowhere.jsonl",), "input not found"),
    "empty folder": (("empty",), "no input file"),
    "named twice": (("a.jsonl", "./a.jsonl"), "meant twice"),
    "unknown kind": (("a.pdf",), "unknown kind"),
    "UTF-16": (("wide.jsonl",), "UTF-16"),
    "several splits": (("splits",), "train, test"),
    "packed and unpacked": (("twins",), r"twins/b\.jsonl and twins/b\.jsonl\.gz seem to hold the same"),
    "a name in another encoding": (("a\udce9.jsonl",), r"a.udce9\.jsonl: its name is not UTF-8"),
}


@pytest.mark.parametrize(("inputs", "message"), REFUSED.values(), ids=list(REFUSED))
def test_wrong_inputs_are_refused(write: Callable[..., None], inputs: tuple[str, ...], message: str) -> None:
    write("a.jsonl")
    write("a.pdf", b"%PDF-1.7")
    write("a\udce9.jsonl")
    write("twins/b.jsonl")
    write("twins/b.jsonl.gz", gzip.compress(RECORD))
    write("wide.jsonl", '{"text": "a"}'.encode("utf-16"))
    write("splits/dataset_dict.json", b'{"splits": ["train", "test"]}')
    Path("empty").mkdir()
    with pytest.raises(RequestError, match=message):
        resolve_inputs(inputs)


OWN_OUTPUT = {
    "x_text_document.manifest.json": b'{\n  "format": "pretrainkit-data-1",',
    "x_text_document.bin": b"12",
    "x.rejects.jsonl": b'{"file":"a.jsonl","line":1}',
    "x.partial/request.json": b"{}",
    "x.partial/lock": b"",
    "mix.json": b'{\n  "format": "pretrainkit-blend-1",',
    "shard-00003.json": b'{\n  "format": "pretrainkit-shard-1",',
    "shard-00003.tar": b"",
    "packed/packed.json": b"{}",
    "packed/data-00000-of-00001.arrow": b"",
    "packed.staging-0123456789abcdef/documents.partial/output-0.0.bin": b"",
}


def test_only_input_is_read_of_a_folder_and_the_rest_is_named(write: Callable[..., None]) -> None:
    wanted = ["in/_a.jsonl", "in/a.jsonl", "in/deep/manifest.json", "in/deep/x.rejects.jsonl", "in/x.partial/a.jsonl"]
    others = ["in/_temporary/0/part.jsonl", "in/part-00000", "in/a.jl.gz", "in/b.csv", "in/deep/a.jsonl.1"]
    for name in (*wanted, *others, "in/_SUCCESS", "in/.cache/a.jsonl", "in/.b.jsonl"):
        write(name)
    left_out: list[str] = []
    assert [source.path for source in resolve_inputs(("in",), left_out=left_out)] == sorted(wanted)
    assert sorted(left_out) == sorted(["in/_temporary/", *others[1:]])
    left_out.clear()
    assert [source.path for source in resolve_inputs(("in/**/*.jsonl",), left_out=left_out)] == sorted(
        name for name in wanted if name.endswith("l")
    )
    assert left_out == [others[0]]


def test_what_our_tools_wrote_is_not_input(write: Callable[..., None]) -> None:
    write("in/a.jsonl")
    for name, content in OWN_OUTPUT.items():
        write(f"in/{name}", content)
    left_out: list[str] = []
    assert [source.path for source in resolve_inputs(("in",), left_out=left_out)] == ["in/a.jsonl"]
    assert not left_out


def test_saved_datasets_below_a_folder_are_read(write: Callable[..., None]) -> None:
    write("in/en/state.json", b'{"_data_files": [{"filename": "data.arrow"}]}')
    for name in ("in/en/dataset_info.json", "in/en/data.arrow", "in/en/cache-1.arrow", "in/ja.jsonl"):
        write(name)
    assert [source.path for source in resolve_inputs(("in",))] == ["in/en/data.arrow", "in/ja.jsonl"]


def test_a_file_without_a_known_suffix_is_json_lines_if_it_looks_so(write: Callable[..., None]) -> None:
    write("corpus")
    write("corpus.data", gzip.compress(RECORD))
    plain, packed = resolve_inputs(("corpus", "corpus.data"))
    assert isinstance(plain, JsonLines)
    assert isinstance(packed, Compressed)
    assert (type(packed.text), packed.compression) == (JsonLines, "gz")


def blocks_of(source: Source, counts: RangeCounts | None = None) -> list[Block]:
    (part,) = source.split(0, ("text",))
    return list(source.blocks(part, RecordRules(("text",)), counts or RangeCounts(0)))


def test_blocks_are_whole_lines_and_all_of_the_file(write: Callable[..., None]) -> None:
    lines = [b"x" * (i * 7919 % 50_000) + b"\n" for i in range(900)]
    data = b"".join(lines)[:-1]
    write("in.jsonl.gz", gzip.compress(data, 1))
    (source,) = resolve_inputs(("in.jsonl.gz",))
    counts = RangeCounts(0)
    blocks = blocks_of(source, counts)
    assert b"".join(block.data for block in blocks) == data
    assert len(blocks) >= len(data) // BLOCK_BYTES
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    assert sum(block.disk_bytes for block in blocks) == source.num_bytes
    assert sum(block.num_lines for block in blocks) == 900
    again = PieceHash()
    again.update(Path("in.jsonl.gz").read_bytes())
    assert counts.digests == again.finish()


def test_a_line_longer_than_a_block_is_one_block(write: Callable[..., None]) -> None:
    data = b"x" * (2 * BLOCK_BYTES + 5) + b"\nshort\n"
    write("in.jsonl.gz", gzip.compress(data, 1))
    (source,) = resolve_inputs(("in.jsonl.gz",))
    assert [block.data[-6:] for block in blocks_of(source)] == [b"short\n"]


@pytest.mark.parametrize("place", [30, -5], ids=["inside", "checksum"])
def test_a_damaged_archive_is_an_error_with_its_name(write: Callable[..., None], place: int) -> None:
    data = bytearray(gzip.compress(os.urandom(100_000)))
    data[place] ^= 0xFF
    write("in.jsonl.gz", bytes(data))
    (source,) = resolve_inputs(("in.jsonl.gz",))
    with pytest.raises(DataError, match=r"in\.jsonl\.gz: cut or damaged"):
        blocks_of(source)


def test_small_files_share_items_and_large_ones_are_cut(write: Callable[..., None]) -> None:
    for i in range(50):
        write(f"small{i}.jsonl", RECORD * 1000)
    write("zlarge.jsonl", RECORD * (2 * BLOCK_BYTES // len(RECORD)))
    sources = resolve_inputs((".",))
    items = cut(sources, [0] * len(sources), ("text",))
    assert len(items) == 3
    parts = [part for item in items for part in item.ranges]
    assert [part.source for part in parts] == [*range(51), 50]
    assert sum(part.end - part.begin for part in parts) == sum(source.num_bytes for source in sources)
    per_file = cut(sources, list(range(len(sources))), ("text",))
    assert all(len(item.ranges) == 1 for item in per_file)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_jobs_share_all_items_without_overlap(count: int) -> None:
    sizes = [1, 1, 50, 3, 3, 3, 8, 1, 20, 20, 1]
    items = [WorkItem(0, (FileRange(i, 0, size, 0, 0, size),), is_stream=i % 4 == 0) for i, size in enumerate(sizes)]
    ranges = [shard(items, i, count) for i in range(count)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(items)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


ARRAYS = {
    "plain": ("2/5", {}, (2, 5)),
    "slurm": ("array", {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "9"}, (3, 6)),
    "slurm steps": (
        "array",
        {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "9"}
        | {"SLURM_ARRAY_TASK_STEP": "3"},
        (2, 4),
    ),
    "grid engine": ("array", {"SGE_TASK_ID": "1", "SGE_TASK_FIRST": "1", "SGE_TASK_LAST": "4"}, (0, 4)),
    "pbs": ("array/10", {"PBS_ARRAY_INDEX": "9"}, (9, 10)),
}


@pytest.mark.parametrize(("text", "environment", "wanted"), ARRAYS.values(), ids=list(ARRAYS))
def test_array_variables_give_the_part(text: str, environment: dict[str, str], wanted: tuple[int, int]) -> None:
    assert parse_shard(text, environment) == wanted


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("5/5", {}),
        ("x/2", {}),
        ("3", {}),
        ("array", {}),
        ("array", {"SGE_TASK_ID": "undefined"}),
        ("array", {"PBS_ARRAY_INDEX": "3"}),
        ("array/5", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "3"}),
    ],
)
def test_a_part_that_is_not_there_is_refused(text: str, environment: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="--shard"):
        parse_shard(text, environment)
