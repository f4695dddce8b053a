from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pretrainkit.data.indexed import labels
from pretrainkit.data.indexed.labels import (
    InputLabels,
    StoredLabels,
    check_labels,
    count_labels,
    input_names,
    label_code,
    label_record,
    text_sizes,
)
from pretrainkit.errors import DataError


def test_labels_are_counted_and_read_back(tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {}
    sizes = text_sizes(["a", "bé", "データ", "コード"])
    codes = [count_labels(["ja", "en", "ja"], np.array([3, 5, 7], np.int32), sizes[:3], counts)]
    codes.append(count_labels(["コード"], np.array([2], np.int32), sizes[3:], counts))
    assert counts == {"ja": [2, 10, 10], "en": [1, 5, 3], "コード": [1, 2, 9]}
    (tmp_path / "a.labels").write_bytes(np.concatenate(codes).tobytes())
    record = label_record("lang", 0, counts)
    assert record.text_bytes == {"ja": 10, "en": 3, "コード": 9}
    stored = StoredLabels(tmp_path / "a", record)
    assert [stored.label_of(number) for number in range(4)] == ["ja", "en", "ja", "コード"]
    assert stored.codes(np.array([3, 0])).tolist() == [label_code("コード"), label_code("ja")]
    (tmp_path / "a.labels").write_bytes(b"1234")
    with pytest.raises(DataError, match="16 bytes"):
        StoredLabels(tmp_path / "a", record)


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_the_documents_of_each_input_have_its_label(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(labels, "BLOCK", block)
    generator = random.Random(3)
    for _ in range(50):
        numbers = [generator.randrange(4) for _ in range(generator.randrange(2, 8))]  # documents of each input
        lengths = [[generator.randrange(1, 5) for _ in range(number)] for number in numbers]
        names = [f"file {i % 3}" for i in range(len(numbers))]
        sizes = [(name, sum(part), 0) for name, part in zip(names, lengths, strict=True)]
        found = InputLabels(np.array([length for part in lengths for length in part], np.int32), sizes)
        wanted = [label_code(name) for name, number in zip(names, numbers, strict=True) for _ in range(number)]
        assert found.codes(np.arange(len(wanted))).tolist() == wanted


def test_inputs_are_named_by_their_place_or_of_many_by_their_folder() -> None:
    assert input_names(["/d/ja/a.jsonl", "/d/ja/b.jsonl", "/d/en.jsonl"]) == ["ja/a.jsonl", "ja/b.jsonl", "en.jsonl"]
    assert set(input_names([f"/d/{language}/{i}" for language in ("ja", "en") for i in range(40)])) == {"ja", "en"}


def test_labels_that_are_texts_or_share_a_code_are_refused() -> None:
    with pytest.raises(DataError, match="more than 1000 different labels"):
        check_labels(map(str, range(1001)))
    with pytest.raises(DataError, match="'plumless' and 'buckeroo' have the same CRC-32"):
        check_labels(["plumless", "buckeroo"])
