"""Which pairs a path means, and sets that lack documents or have them twice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pair_manifests import describe

from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.indexed.blend import make_blend
from pretrainkit.data.indexed.format import bin_path, idx_path, open_pair
from pretrainkit.data.indexed.manifest import InputFile, SetPart
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.data.indexed.request import Request, make_plan
from pretrainkit.errors import RequestError

DOCUMENTS = [[5, 6, 1], [7, 1]]
Make = Callable[..., Path]


@pytest.fixture
def make(make_pair: Make, tmp_path: Path) -> Make:
    """Write a pair, with a manifest if it is a part of a set or its inputs are named; gives the prefix."""

    def write(name: str, part: SetPart | None = None, inputs: tuple[InputFile, ...] = ()) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        prefix = make_pair(name, DOCUMENTS)
        if part or inputs:
            describe(prefix, part=part, inputs=inputs)
        return prefix

    return write


def test_pairs_of_a_folder_come_in_natural_order(make: Make, tmp_path: Path) -> None:
    for name in ("part10_text", "part2_text", "part1_text"):
        make(name)
    assert [prefix.name for prefix in find_pairs(tmp_path)] == ["part1_text", "part2_text", "part10_text"]
    assert find_pairs(tmp_path / "part2_text") == find_pairs(tmp_path / "part2_text.idx") == [tmp_path / "part2_text"]
    assert open_pair(tmp_path / "part2_text").num_tokens == 5


def test_a_folder_means_the_pairs_in_it_and_below(make: Make, tmp_path: Path) -> None:
    unfinished = "ja.partial/output-0.0", "set.staging-0123456789abcdef/documents", ".hidden/a", ".hidden"
    for name in ("ja/part10", "ja/part2", "own", "en/a/part1", *unfinished):
        make(name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"weights")
    found = [str(prefix.relative_to(tmp_path)) for prefix in find_pairs(tmp_path)]
    assert found == ["en/a/part1", "ja/part2", "ja/part10", "own"]
    assert [entry.name for entry in make_blend([f"text={tmp_path}"])] == [f"text/{name}" for name in found]
    assert len(read_dataset(str(tmp_path), "1,0,0").facts.prefixes) == 4


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no \.bin/\.idx pair"):
        find_pairs(tmp_path)


@pytest.mark.parametrize("lost", ["bin", "idx", "both"])
def test_half_a_pair_below_a_folder_is_missed(make: Make, tmp_path: Path, lost: str) -> None:
    make("a")
    prefix = make("below/a_text_document", inputs=(InputFile("a", 1, "", 1, 1),))
    for path in (bin_path(prefix), idx_path(prefix)):
        if lost in ("both", path.suffix[1:]):
            path.unlink()
    with pytest.raises(RequestError, match=r"half of a pair is missing: .*below/a_text_document"):
        find_pairs(tmp_path)


def array(name: str, *numbers: int, count: int = 3, set_id: str = "s", folder: str = "") -> dict[str, SetPart | None]:
    return {
        f"{folder}{name}.shard-{i:05d}-of-{count:05d}_text_document": SetPart(i, count, set_id) if set_id else None
        for i in numbers
    }


def per_file(*names: str, count: int, set_id: str = "s", folder: str = "out/") -> dict[str, SetPart | None]:
    return {f"{folder}{name}_text_document": SetPart(i, count, set_id, name) for i, name in enumerate(names)}


SETS: dict[str, tuple[dict[str, SetPart | None], str]] = {
    "array": (array("x", 0, 1, 2), ""),
    "array over folders": (array("x", 0, 2) | array("x", 1, folder="b/"), ""),
    "two arrays": (array("x", 0, 1, 2) | array("y", 0, 1, count=2, set_id="t"), ""),
    "array lacks one": (array("x", 0, 2), "1 of 3 parts of an array are missing: 1$"),
    "array lacks one, no manifest": (array("x", 0, 2, set_id=""), "1 of 3 parts of an array are missing: 1$"),
    "renamed part": ({"a_text_document": SetPart(0, 3, "s")}, "2 of 3 parts of an array are missing: 1-2$"),
    "another number of parts": (array("x", 0, 1, 2) | array("x", 0, 1, count=2), "are parts of different runs"),
    "other input or flags": (array("x", 0, 1) | array("x", 2, set_id="t"), "are parts of different runs"),
    "array twice": (array("x", 0, 1, 2) | array("x", 1, folder="b/"), "hold the same documents"),
    "array by two names": (array("x", 0, 1, 2) | array("y", 0, 1, 2), "hold the same documents"),
    "files": (per_file("a", "ja/b", count=2), ""),
    "files of two runs": (per_file("a", count=1) | per_file("b", count=1, set_id="t"), ""),
    "file missing": (per_file("a", "ja/b", count=3), "1 of 3 pairs of --per-file are missing: 2$"),
    "files of an unfinished replacement": (
        per_file("a", "b", count=2) | {"out/a_text_document": SetPart(0, 2, "t", "a")},
        "1 of 2 pairs of --per-file are missing",
    ),
}


@pytest.mark.parametrize(("names", "problem"), SETS.values(), ids=list(SETS))
def test_sets_are_complete_and_there_once(
    make: Make, tmp_path: Path, names: dict[str, SetPart | None], problem: str
) -> None:
    for name, part in names.items():
        make(name, part)
    if problem:
        with pytest.raises(RequestError) as refused:
            find_pairs(tmp_path)
        assert re.search(problem, refused.value.found)
    else:
        assert len(find_pairs(tmp_path)) == len(names)


def test_pairs_may_be_used_without_the_rest_of_their_set(make: Make, tmp_path: Path) -> None:
    part = make("x.shard-00000-of-00002_text_document", SetPart(0, 2, "s"))
    assert find_pairs(part) == [part]
    for name, of in per_file("ja/a", "ja/b", "en/c", count=9).items():
        make(name, of)
    assert len(find_pairs(tmp_path / "out/ja")) == 2


def test_no_input_file_is_in_two_pairs(make: Make, tmp_path: Path) -> None:
    whole = InputFile("c.jsonl", 10, "ab", 2, 2)
    share = InputFile("c.jsonl", 10, "", 1, 1)
    for i in range(2):
        make(f"parts/x.shard-0000{i}-of-00002_text_document", SetPart(i, 2, "s"), (share,))
    make("x_text_document", inputs=(whole,))
    with pytest.raises(RequestError, match=r"x_text_document hold the same documents"):
        find_pairs(tmp_path)
    make("x_text_document", inputs=(InputFile("c.jsonl", 11, "ab", 2, 2),))
    assert len(find_pairs(tmp_path)) == 3


@pytest.mark.parametrize("other", ["packed/packed.json", "packed.json", "shards/shard-00000.json", "shard-00000.tar"])
def test_data_of_two_forms_is_refused(make: Make, tmp_path: Path, other: str) -> None:
    make("a/a")
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("{}")
    for read in (find_pairs, lambda path: read_dataset(str(path), "1,0,0")):
        with pytest.raises(RequestError, match=r"more than one of \.bin/\.idx pairs, token shards"):
            read(tmp_path)


def test_token_shards_at_two_depths_are_refused(tmp_path: Path) -> None:
    for name in ("shard-00000.json", "below/shard-00000.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(RequestError, match="more than one of"):
        read_dataset(str(tmp_path), "1,0,0")


def test_a_corrected_file_stays_in_the_set_of_its_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    for name in "abc":
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{name}.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    request = Request(
        inputs=(str(tmp_path / "text"),),
        output_prefix=str(tmp_path / "out" / "x"),
        tokenizer_model=str(tokenizer_folder),
        per_file=True,
    )

    def ids(part: int) -> set[str]:
        plan = make_plan(dataclasses.replace(request, shard=(part, 3)))
        return {output.part.set_id for output in plan.outputs if output.part}

    first = ids(0)
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "one"}\n')
    assert ids(1) == first
    (tmp_path / "text" / "d.jsonl").write_text('{"text": "three"}\n')
    assert ids(1) != first
