"""Overlaps with evaluation sets, against a search word by word."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.data.decontamination.evaluations import find_evaluations
from pretrainkit.data.decontamination.overlap import OverlapFinder, build_index
from pretrainkit.errors import RequestError

Find = Callable[..., OverlapFinder]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"w{i}" for i in range(300)), "don't", "U.S.", "naïve", "Ωmega"]
KANJI = "日本語の文章を読み書きする人々は、東京に住んでいた。한국어문장中文标点「」"


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """The finder of overlaps with some texts."""

    def make(texts: list[str], *, num_words: int = 13, name: str = "quiz.jsonl") -> OverlapFinder:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        evaluations = find_evaluations((str(tmp_path),), num_words, "drop")
        assert evaluations is not None
        return OverlapFinder(build_index(evaluations))

    return make


def sentence(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def characters(chance: random.Random, count: int) -> str:
    return "".join(chance.choices(KANJI, k=count))


def rude(chance: random.Random, text: str) -> str:
    """The same words in other letters, spaces and punctuation."""
    words = [word.upper() if chance.random() < 0.3 and word.isascii() else word for word in text.split(" ")]
    return "".join(word + chance.choice([" ", "  ", "\n", ", ", " - ", '" ', ".\t"]) for word in words)


@pytest.mark.parametrize("length", [13, 14, 40])
def test_every_planted_leak_is_found_and_nothing_else(find: Find, length: int) -> None:
    chance = random.Random(length)
    leaks = [sentence(chance, length) for _ in range(300)]
    finder = find(leaks)
    texts = []
    for leak in leaks:
        part = chance.randrange(length - 12)
        words = rude(chance, " ".join(leak.split(" ")[part : part + 13]))
        texts.append(f"{sentence(chance, chance.randrange(50))} {words} {sentence(chance, chance.randrange(50))}")
        near = leak.split(" ")[:13]
        near[6] = "other"
        texts.append(f"{sentence(chance, 30)} {' '.join(near)} {sentence(chance, 30)}")
    assert [*finder.find(texts)] == [*range(0, len(texts), 2)]
    assert finder.find(texts)[0].names == ("quiz",)


@pytest.mark.parametrize("length", [26, 27, 60])
def test_leaks_in_scripts_without_spaces_are_found(find: Find, length: int) -> None:
    chance = random.Random(length)
    leaks = [characters(chance, length) for _ in range(200)]
    finder = find(leaks)
    texts = []
    for leak in leaks:
        part = chance.randrange(length - 25)
        texts.append(characters(chance, 50) + leak[part : part + 26] + characters(chance, 50))
        texts.append(characters(chance, 50) + "x" + leak[part : part + 25] + "x" + characters(chance, 50))
    assert [*finder.find(texts)] == [*range(0, len(texts), 2)]


def test_two_characters_count_as_a_word_in_mixed_text(find: Find) -> None:
    leak = "GPT 4 は東京で three words と日本語の文章です。まで v2"  # 5 words and 16 characters
    finder = find([leak])
    assert [*finder.find(["前置き" + leak, "前置き" + leak.replace("v2", "v3")])] == [0]


def test_words_of_one_letter_are_found(find: Find) -> None:
    leak = "a b c d e f g h i j k l m"
    assert [*find([leak]).find(["x " + leak + " y", "x " + leak[:-1] + "n", leak.replace(" ", ""), leak])] == [0, 3]


def test_short_texts_are_counted_and_no_overlap(find: Find, caplog: pytest.LogCaptureFixture) -> None:
    finder = find(["one two three", "a b c d e f g h i j k l m n"])
    assert "1 texts of evaluation sets have less than 13 words" in caplog.text
    assert finder.find(["one two three four five six seven eight nine ten eleven twelve thirteen"]) == {}
    assert [*find(["one two three"], num_words=3).find(["zero one, two three"])] == [0]


def test_all_strings_of_a_record_are_looked_for(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(40)]
    record = {"id": 5, "question": " ".join(words[:14]), "choices": {"text": [" ".join(words[14:28]), "no"]}}
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "b.txt").write_text(" ".join(words[26:]) + "\n")
    evaluations = find_evaluations((str(tmp_path),), 13, "drop")
    assert evaluations is not None
    finder = OverlapFinder(build_index(evaluations))
    found = finder.find([" ".join(words[1:14]), " ".join(words[14:28]), " ".join(words[27:]), " ".join(words[20:33])])
    assert {place: overlap.names for place, overlap in found.items()} == {0: ("a",), 1: ("a",), 2: ("b",)}


def test_wrong_evaluation_sets_are_refused(tmp_path: Path) -> None:
    assert find_evaluations((), 13, "drop") is None
    (tmp_path / "a.jsonl").write_text("{broken\n")
    evaluations = find_evaluations((str(tmp_path),), 13, "drop")
    assert evaluations is not None
    with pytest.raises(RequestError, match=r"a\.jsonl:1: not a record"):
        build_index(evaluations)
    for inputs, words, message in (((str(tmp_path / "no"),), 13, "input not found"), ((), 0, "1 or more")):
        with pytest.raises(RequestError, match=message):
            find_evaluations(inputs, words, "drop")
