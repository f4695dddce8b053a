"""What is known about a dataset before a run, and what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from indexed_writer import IndexedDatasetWriter

from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.documents import document_labels
from pretrainkit.data.indexed.blend import make_blend, write_blend
from pretrainkit.errors import RequestError
from pretrainkit.files import same_fingerprint


def write_pair(prefix: Path, lengths: list[int], first_id: int = 0) -> Path:
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in lengths:
            writer.add_document(np.arange(first_id, first_id + length))
    return prefix


def test_tokens_are_counted_by_split(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    reading = read_dataset(str(tmp_path / "a"), "7,2,1")
    assert reading.split_tokens == ((28, 17, 10),)
    assert (reading.facts.num_tokens, reading.facts.num_documents, reading.facts.weights) == (55, 10, ())
    assert reading.facts.max_token_id is None


def test_a_malformed_split_leaves_the_rest_readable(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [1, 2])
    assert read_dataset(str(tmp_path / "a"), "nonsense").split_tokens is None


def test_a_folder_is_a_blend_in_proportion_to_tokens(tmp_path: Path) -> None:
    write_pair(tmp_path / "part10", [30, 30])
    write_pair(tmp_path / "part2", [20])
    facts = read_dataset(str(tmp_path), "1,0,0").facts
    assert facts.prefixes == (str(tmp_path / "part2"), str(tmp_path / "part10"))
    assert facts.weights == (20.0, 60.0)


def test_weights_are_kept_and_shared_out_in_a_folder(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [10])
    write_pair(tmp_path / "b c", [10])
    write_pair(tmp_path / "many" / "x", [10])
    write_pair(tmp_path / "many" / "y", [30])
    path = f"0.2 {tmp_path / 'a'} 0.4 '{tmp_path / 'b c'}' 0.4 {tmp_path / 'many'}"
    facts = read_dataset(path, "1,0,0", "10:0,1,4 20:1,0,0").facts
    assert facts.weights == (0.2, 0.4, 0.1, pytest.approx(0.3))
    assert facts.part_names == ("a", "b c", "many", "many")
    assert [change.step for change in facts.schedule] == [10, 20]
    assert facts.schedule[0].weights == pytest.approx((0, 1, 1, 3)) and facts.schedule[1].weights == (1, 0, 0, 0)
    assert read_dataset(path, "1,0,0", "nonsense").facts.schedule == (), "reported by the checks of the request"
    for wrong_path, schedule, found in ((path, "10:1,2", "3 parts"), (str(tmp_path), "10:1,2,3,4", "no weights")):
        with pytest.raises(RequestError, match=found):
            read_dataset(wrong_path, "1,0,0", schedule)


def test_parts_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    for name in ("ja/web_text_document", "en/web_text_document", "en/books"):
        write_pair(tmp_path / name, [10])
    for number in range(2):
        write_pair(tmp_path / f"en/code.shard-{number:05d}-of-00002_text_document", [10])
    path = f"1 {tmp_path}/ja/web_text_document 1 {tmp_path}/en/web_text_document 1 {tmp_path}/en/books"
    assert read_dataset(path, "1,0,0").facts.part_names == ("ja/web_text_document", "en/web_text_document", "books")
    names = ("books", "code_text_document", "code_text_document", "web_text_document")
    assert read_dataset(str(tmp_path / "en"), "1,0,0").facts.part_names == names, "tasks of an array are one part"


def test_labels_have_names_that_tell_their_data_apart(tmp_path: Path) -> None:
    for name in ("ja/web_text_document", "en/web_text_document", "en/books"):
        write_pair(tmp_path / name, [10])
    for number in range(2):
        write_pair(tmp_path / f"en/code.shard-{number:05d}-of-00002_text_document", [10])
    facts = read_dataset(str(tmp_path), "1,0,0").facts
    assert facts.labels == ("books", "code_text_document", "en/web_text_document", "ja/web_text_document")
    of_samples = {name for prefix in facts.prefixes for name in document_labels(prefix, facts.prefixes).names}
    assert of_samples == {*facts.labels}
    alone = read_dataset(f"1 {tmp_path}/ja/web_text_document 1 {tmp_path}/en/books", "1,0,0").facts
    assert alone.labels == ("books", "web_text_document")


def test_a_manifest_tells_tokenizer_and_largest_id(dataset_folder: Path) -> None:
    reading = read_dataset(str(dataset_folder), "8,2,0")
    assert reading.facts.max_token_id == 99
    assert reading.tokenizers[0] and len(reading.tokenizers[0]) == 64


def test_a_pair_without_a_manifest_has_an_eod_if_one_token_ends_its_documents(tmp_path: Path) -> None:
    without = write_pair(tmp_path / "without", [3, 4, 5])
    with IndexedDatasetWriter(tmp_path / "with", np.dtype(np.uint16)) as writer:
        for length in (0, 3, 4):
            writer.add_document([*range(length), 9] if length else [])
    reading = read_dataset(f"1 {without} 1 {tmp_path / 'with'}", "1,0,0")
    assert reading.without_eod == (str(without),)


def test_the_hash_is_of_the_content_not_the_place(dataset_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset_folder, tmp_path / "copy")
    write_pair(tmp_path / "a", [5, 6])
    write_pair(tmp_path / "moved" / "b", [5, 6])
    write_pair(tmp_path / "other", [5, 6], first_id=1)

    def hash_of(path: Path) -> str:
        return read_dataset(str(path), "1,0,0").facts.data_hash

    assert hash_of(tmp_path / "copy") == hash_of(dataset_folder)
    assert hash_of(tmp_path / "a") == hash_of(tmp_path / "moved" / "b") != hash_of(tmp_path / "other")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_the_hash_sees_changed_bytes_under_an_unchanged_record(
    dataset_folder: Path, tmp_path: Path, has_manifest: bool, suffix: str
) -> None:
    shutil.copytree(dataset_folder, tmp_path / "copy")
    (prefix,) = (path.with_suffix("") for path in (tmp_path / "copy").glob("*.bin"))
    if not has_manifest:
        prefix.with_name(f"{prefix.name}.manifest.json").unlink()
    before = read_dataset(str(prefix), "1,0,0").facts.data_hash
    with prefix.with_name(prefix.name + suffix).open("r+b") as file:
        file.seek(-9 if suffix == ".idx" else 101, os.SEEK_END if suffix == ".idx" else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    changed = read_dataset(str(prefix), "1,0,0").facts.data_hash
    assert not same_fingerprint(before, changed)
    assert same_fingerprint(before, before.partition("+")[0]), "an older version's"


def test_a_blend_file_gives_its_weights_and_is_checked_against_the_data(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path / "a", [10]), write_pair(tmp_path / "b", [30])
    entries = make_blend([f"ja={a}:0.6", f"en={b}:0.2"])
    write_blend(tmp_path / "mix.json", entries)
    facts = read_dataset(str(tmp_path / "mix.json"), "1,0,0").facts
    assert (facts.prefixes, facts.weights) == ((str(a), str(b)), (pytest.approx(0.75), pytest.approx(0.25)))
    assert facts.part_names == ("ja", "en")
    (tmp_path / "moved").mkdir()
    write_blend(
        tmp_path / "moved/mix.json", [replace(entry, prefix=f"../{Path(entry.prefix).name}") for entry in entries]
    )
    assert read_dataset(str(tmp_path / "moved/mix.json"), "1,0,0").facts == facts
    write_pair(tmp_path / "a", [11])
    assert "11 tokens, 10 when the blend was made" in wrong(str(tmp_path / "mix.json"))
    for changed, found in (({"weight": -1.0}, "a weight above 0"), ({"prefix": str(b), "num_tokens": 30}, "twice")):
        write_blend(tmp_path / "mix.json", [replace(entries[0], **changed), entries[1]])  # type: ignore[arg-type]
        assert found in wrong(str(tmp_path / "mix.json"))
    (tmp_path / "mix.json").write_text("{}")
    assert "not a blend file" in wrong(str(tmp_path / "mix.json"))


def wrong(path: str) -> str:
    with pytest.raises(RequestError) as error:
        read_dataset(path, "1,0,0")
    return str(error.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{0}/nothing", "no .bin/.idx pair here"),
        ("{0}", "no .bin/.idx pair here"),
        ("1 {0}/a 2", "weight prefix weight prefix"),
        ("x {0}/a 2 {0}/b", "'x' is not a weight"),
        ("0 {0}/a 1 {0}/b", "weight 0 of"),
        ("-1 {0}/a 1 {0}/b", "weight -1 of"),
        ("nan {0}/a 1 {0}/b", "weight nan of"),
    ],
)
def test_a_wrong_path_is_told(tmp_path: Path, path: str, expected: str) -> None:
    assert expected in wrong(path.format(tmp_path))


def test_half_a_pair_a_cut_pair_and_a_prefix_named_twice_are_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [5, 6])
    assert "named twice" in wrong(f"1 {prefix} 2 {tmp_path}/../{tmp_path.name}/a")
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(3)
    assert "a.bin" in wrong(str(prefix))
    (tmp_path / "a.bin").unlink()
    assert "half of a pair" in wrong(str(prefix))


def test_a_manifest_of_other_data_is_refused(dataset_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset_folder, tmp_path / "copy")
    name = next((tmp_path / "copy").glob("*.bin")).with_suffix("")
    write_pair(name, [5, 6])
    assert "manifest" in wrong(str(tmp_path / "copy"))
