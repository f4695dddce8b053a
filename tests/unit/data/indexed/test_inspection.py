"""Verifying, joining, counting and mixing prepared data."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pair_manifests import EOD, describe

from pretrainkit.data.indexed.blend import dataset_path, make_blend, read_blend, write_blend
from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.data.indexed.inspect import count_epoch, plot, read_statistics, show
from pretrainkit.data.indexed.manifest import TokenizerRecord, manifest_path, read_manifest
from pretrainkit.data.indexed.merge import merge
from pretrainkit.data.indexed.verify import verify
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import DataError, RequestError

DOCUMENTS = [[5, 6, EOD], [7, EOD], [8, 9, 10, EOD]]
MakePair = Callable[..., Path]


def test_a_manifest_comes_back_as_written(make_pair: MakePair) -> None:
    prefix = make_pair("a", DOCUMENTS)
    assert read_manifest(prefix) is None
    assert describe(prefix) == read_manifest(prefix)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}', '{"format": "pretrainkit-data-1"}'])
def test_a_damaged_manifest_is_an_error(make_pair: MakePair, text: str) -> None:
    prefix = make_pair("a", DOCUMENTS)
    manifest_path(prefix).write_text(text)
    with pytest.raises(DataError, match=r"a\.manifest\.json"):
        read_manifest(prefix)
    assert verify(prefix).problems


def test_good_data_verifies_with_and_without_a_manifest(make_pair: MakePair) -> None:
    prefix = make_pair("a", DOCUMENTS)
    plain = verify(prefix)
    assert (plain.problems, plain.notes) == ([], ["no manifest: data made by Megatron itself"])
    assert verify(prefix, num_ids=10).problems == ["token id 10, but the tokenizer has ids up to 9"]
    describe(prefix)
    assert (verify(prefix).problems, verify(prefix).largest_id) == ([], 10)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the tokens": (lambda p: overwrite(bin_path(p), 2, b"\x07"), "checksum"),
    "an id out of range": (lambda p: overwrite(bin_path(p), 0, b"\xff\xff"), "token id 65535"),
    "no index": (lambda p: idx_path(p).unlink(), "file not found"),
    "a pointer": (lambda p: overwrite(idx_path(p), 34 + 12 + 8, b"\x08"), "sequence 1 does not begin"),
    "a length": (lambda p: overwrite(idx_path(p), 34, b"\x02"), "sequence 1 does not begin"),
    "a negative length": (lambda p: overwrite(idx_path(p), 34 + 4, b"\xff\xff\xff\xff"), "negative length"),
    "the document index": (lambda p: overwrite(idx_path(p), 34 + 36 + 8, b"\x03"), "goes backwards"),
    "documents cut off": (lambda p: overwrite(idx_path(p), 34 + 36 + 24, b"\x02"), "documents cover"),
    "a byte more for each document": (lambda p: overwrite(idx_path(p), 34 + 36 + 32, bytes(3)), "hash (XXH3-128)"),
    "another manifest": (lambda p: describe(p, num_tokens=8), "tokens: 9 on disk, 8"),
}


@pytest.mark.parametrize(("damage", "found"), DAMAGE.values(), ids=list(DAMAGE))
def test_damage_is_found(make_pair: MakePair, damage: Callable[[Path], object], found: str) -> None:
    prefix = make_pair("a", DOCUMENTS)
    describe(prefix)
    damage(prefix)
    assert found in " ".join(verify(prefix).problems)


@pytest.mark.parametrize(
    ("documents", "found"),
    [([[5, 6]], "document 0 does not end with EOD"), ([[5, EOD], [6, EOD, EOD]], "document 1 ends with EOD twice")],
)
def test_eod_is_exactly_one(make_pair: MakePair, documents: list[list[int]], found: str) -> None:
    prefix = make_pair("a", documents)
    describe(prefix)
    assert found in verify(prefix).problems[0]


def test_where_texts_may_spell_eod_some_may_end_with_two_but_not_most(make_pair: MakePair) -> None:
    prefix = make_pair("a", [[5, EOD, EOD], [6, EOD], [7, EOD]])
    describe(prefix, special_tokens_in_text="encode")
    assert not verify(prefix).problems
    prefix = make_pair("b", [[5, EOD, EOD], [6, EOD, EOD], [7, EOD]])
    describe(prefix, special_tokens_in_text="encode")
    assert "document 0 and most others end with EOD twice" in verify(prefix).problems[0]


def test_a_join_is_a_concatenation_of_documents(make_pair: MakePair, tmp_path: Path) -> None:
    parts = [[[i, i, EOD]] * count for i, count in ((5, 5), (6, 0), (7, 7))]
    prefixes = [make_pair(f"part{i}", documents) for i, documents in enumerate(parts)]
    for prefix in prefixes:
        describe(prefix)
    whole = merge(prefixes, tmp_path / "whole")
    dataset = IndexedDataset(tmp_path / "whole")
    assert [dataset.document(i).tolist() for i in range(12)] == [*parts[0], *parts[2]]
    assert (
        bin_path(make_pair("direct", [*parts[0], *parts[2]])).read_bytes() == bin_path(tmp_path / "whole").read_bytes()
    )
    assert idx_path(tmp_path / "direct").read_bytes() == idx_path(tmp_path / "whole").read_bytes()
    assert whole == read_manifest(tmp_path / "whole")
    assert verify(tmp_path / "whole").problems == []


def test_a_join_clears_what_a_killed_one_left(make_pair: MakePair, tmp_path: Path) -> None:
    part = make_pair("part", [[5, EOD]])
    process = subprocess.Popen(["true"])
    process.wait()
    old = tmp_path / f"whole.bin.tmp-{socket.gethostname()}-{process.pid}"
    old.write_bytes(b"part of a file")
    merge([part], tmp_path / "whole")
    assert not old.exists()
    assert verify(tmp_path / "whole").num_documents == 1


def test_many_parts_need_few_open_files(make_pair: MakePair, tmp_path: Path) -> None:
    import resource

    prefixes = [make_pair(f"part{i}", DOCUMENTS) for i in range(150)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 50, limits[1]))
    try:
        merge(prefixes, tmp_path / "whole")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert IndexedDataset(tmp_path / "whole").num_documents == 450


def test_parts_that_do_not_fit_together_are_refused_before_writing(make_pair: MakePair, tmp_path: Path) -> None:
    first, wide, other = make_pair("a", DOCUMENTS), make_pair("b", DOCUMENTS, np.int32), make_pair("c", DOCUMENTS)
    with pytest.raises(RequestError, match=r"a holds uint16.*b holds int32"):
        merge([first, wide], tmp_path / "whole")
    describe(first)
    describe(other, tokenizer=TokenizerRecord("another", "cd" * 32, 319, EOD, 0, "tokenizers"))
    with pytest.raises(RequestError, match="one tokenizer"):
        merge([first, other], tmp_path / "whole")
    with pytest.raises(RequestError, match="named twice"):
        merge([first, first], tmp_path / "whole")
    shards = [make_pair(f"x.shard-0000{i}-of-00003_text_document", DOCUMENTS) for i in (0, 2)]
    with pytest.raises(RequestError, match=r"1 of 3 parts of an array are missing: 1"):
        merge(shards, tmp_path / "whole")
    make_pair("whole", DOCUMENTS)
    with pytest.raises(RequestError, match="output exists"):
        merge([first], tmp_path / "whole")
    assert not list(tmp_path.glob("*.tmp-*"))


def test_statistics_count_documents_and_tokens(make_pair: MakePair, tmp_path: Path) -> None:
    statistics = read_statistics(make_pair("a", [[1] * length for length in (1, 2, 3, 4, 100)]))
    assert statistics.histogram == [(1, 1, 1), (2, 2, 5), (4, 1, 4), (64, 1, 100)]
    assert (statistics.quantiles["shortest"], statistics.quantiles["median"]) == (1, 3)
    assert read_statistics(make_pair("empty", [])).histogram == []
    plot([statistics], tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_an_epoch_is_what_megatron_makes_of_the_tokens(make_pair: MakePair) -> None:
    prefix = make_pair("a", [[1] * 10] * 10)
    (training,) = count_epoch([prefix], "100,0,0", 16, 2)
    assert (training.num_tokens, training.num_samples, training.num_steps) == (100, 6, 3)
    splits = count_epoch([prefix, make_pair("b", [[1] * 10] * 10)], "80,20,0", 16, 2)
    assert [(s.split, s.num_documents, s.num_tokens, s.num_samples) for s in splits] == [
        ("training", 16, 160, 8),
        ("validation", 4, 40, 2),
    ]


def test_a_split_without_a_sample_is_refused(make_pair: MakePair) -> None:
    with pytest.raises(RequestError, match="the validation split of 9998,1,1 has 0 tokens"):
        count_epoch([make_pair("a", DOCUMENTS)], "9998,1,1", 2, 1)


def test_a_blend_has_the_weights_asked_for(make_pair: MakePair, tmp_path: Path) -> None:
    a, b = make_pair("a", DOCUMENTS), make_pair("b", DOCUMENTS * 3)
    entries = make_blend([f"ja={a}:0.6", f"{b}:0.2"])
    assert [(entry.name, round(entry.weight, 9), entry.num_tokens) for entry in entries] == [
        ("ja", 0.75, 9),
        ("b", 0.25, 27),
    ]
    assert [entry.weight for entry in make_blend([str(a), str(b)])] == [0.25, 0.75]
    lifted = make_blend([str(tmp_path)], temperature=2)
    assert round(lifted[1].weight / lifted[0].weight, 9) == round(3**0.5, 9)
    write_blend(tmp_path / "mix.json", entries)
    assert read_blend(tmp_path / "mix.json") == entries
    assert dataset_path(entries) == f"0.75 {a} 0.25 {b}"
    assert round(entries[0].epochs_of(18), 9) == 1.5
    make_pair("a", DOCUMENTS * 2)
    with pytest.raises(RequestError, match="18 tokens, 9 when the blend was made"):
        read_blend(tmp_path / "mix.json")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["a:0"], "weight 0"),
        (["a:-1"], "weight -1"),
        (["a:nan"], "weight nan"),
        (["a:1", "b"], "some datasets have a weight"),
        (["a:1", "a:1"], "named twice"),
        (["x=a:1", "x=b:1"], "named twice"),
        (["nowhere"], "no .bin/.idx pair"),
        (["a", "empty"], "no token in"),
    ],
)
def test_wrong_mixtures_are_refused(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, documents in (("a", DOCUMENTS), ("b", DOCUMENTS), ("empty", [])):
        make_pair(name, documents)
    with pytest.raises(RequestError, match=message):
        make_blend(parts)


def test_documents_are_shown_with_their_special_tokens(make_pair: MakePair, tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode("日本 text").ids
    prefix = make_pair("a", [[0, *ids, EOD], [EOD]])
    shown = list(show(prefix, "0:", str(tokenizer_folder)))
    assert [document.text for document in shown] == ["<|begin|>日本 text<|end|>", "<|end|>"]
    with pytest.raises(RequestError, match="there are 2 documents"):
        list(show(prefix, "2", str(tokenizer_folder)))
    with pytest.raises(RequestError, match="no manifest"):
        list(show(prefix, "0"))
    record = TokenizerRecord(str(tokenizer_folder), load_tokenizer(tokenizer_folder).sha256, 319, EOD, 0, "tokenizers")
    describe(prefix, tokenizer=record)
    assert next(show(prefix, "1")).ids == [EOD]
