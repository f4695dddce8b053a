"""Whether fastokens gives the ids of Hugging Face tokenizers: on strings that are hard, and on a sample of this input.

A separate process asks tokenizers for its ids while fastokens still loads; a worker, which has fastokens, compares.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import Source
from pretrainkit.data.readers.work_items import WorkItem, sample_texts
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, load_encoder

SAMPLE_PLACES = 8
"""Pieces of the input that the sample is taken from, evenly spread."""
SAMPLE_BYTES = 32_768
"""Text taken at each place: tokenizers reads about 2 MB/s, so that all of it costs a tenth of a second."""
NUM_RANDOM = 1500
MAX_SPECIAL_TOKENS = 24
_RANGES = (
    (0x20, 0x7F), (0x09, 0x0E), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530),
    (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200), (0x2000, 0x2070), (0x3000, 0x3100),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB00), (0xFE00, 0x10000), (0x1D400, 0x1D800),
    (0x1F300, 0x1FB00), (0x20000, 0x20400),
)  # fmt: skip
_FIXED = (
    "", " ", "\n", "a",
    "I'm you're WE'LL they'Ve it'ſ d'D ''s 's",
    "0 12 123 1234 12345 1234567890 1,234.56 ١٢٣٤ ⅷ² ½",
    "tabs\t\tand  double   spaces \n\n\n  lines\r\nends \r\n \r x\u2028y\u2029z\x0bv\x0cf\x85n",
    " leading", "trailing ", "  \n  ", "\u00a0\u2003\u3000wide spaces\u200b\u200d\ufeff",
    "e\u0301 é ﬁ Å Å Ω Ω が か\u3099 각 각 ｶﾞ",
    "क्षि ที่ नी ਸ਼ 𝔘𝔫𝔦 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇰🇷 ❤️ ☎︎",
    "日本語の文章。「かぎ」と句読点、そして英語mixed文字。 中文和标点；没有空格。 한국어 문장, 띄어쓰기.",
    "مرحبا بالعالم שָׁלוֹם Привет ΑΣ ας İstanbul ıI ǅ ß ẞ",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x**2 != 0}  # comment\n\n\n\tif not x:\n\t\tpass\n",
    "<html><body class=\"x\">&amp;</body></html> https://example.org/a_b-c?d=e&f=%20#g",
    "!!!???...---===***~~~```'''\"\"\"\\\\//||", "a" * 3000, " " * 700, "\n" * 300, "=" * 900, "ab" * 900, "あ" * 600,
    "1" * 700, "\ufffd\ufffe\uffff\x01\x7f\x80", "a\u0300" * 300, "🙂" * 200,
)  # fmt: skip


def hard_strings(special_tokens: Iterable[str]) -> list[str]:
    """A fixed set of strings, the same at every start, with this tokenizer's special tokens among them."""
    strings = list(_FIXED)
    for token in list(special_tokens)[:MAX_SPECIAL_TOKENS]:
        strings += [token, f"a{token}b", f" {token} {token}", f"{token[:-1]} {token[1:]}", f"日本{token}語\n{token}"]
    generator = random.Random(20_250_101)
    for number in range(NUM_RANDOM):
        count = generator.randrange(1, 4)
        ranges = [generator.choice(_RANGES) for _ in range(count)]
        length = generator.randrange(1, 60)
        characters = [chr(generator.randrange(*generator.choice(ranges))) for _ in range(length)]
        strings.append("".join(" " if number % 2 and not generator.randrange(5) else c for c in characters))
    return strings


class EnginesDiffer(Exception):
    """fastokens gives other ids than Hugging Face tokenizers, or can't be used for this tokenizer."""


@dataclass(frozen=True)
class ParitySample:
    """The texts for which both libraries are asked."""

    special_tokens: tuple[str, ...]
    sources: list[Source]
    items: list[WorkItem]
    """Pieces of the input from each of which a sample is taken."""
    rules: RecordRules

    @classmethod
    def about(
        cls, special_tokens: Iterable[str], sources: list[Source], items: Sequence[WorkItem], rules: RecordRules
    ) -> ParitySample:
        """A sample of an input that is cut into these items."""
        places = sorted({len(items) * i // SAMPLE_PLACES for i in range(SAMPLE_PLACES)}) if items else []
        return cls(tuple(special_tokens), sources, [items[place] for place in places], rules)

    def texts(self) -> list[str]:
        """Hard strings, then the sample. Raises DataError and OSError when the input can't be read."""
        texts = hard_strings(self.special_tokens)
        for item in self.items:
            texts += sample_texts(self.sources, item, self.rules, SAMPLE_BYTES)
        return texts


@dataclass(frozen=True)
class Answers:
    """What tokenizers gives for some texts."""

    texts: list[str]
    ids: NDArray[np.uint32]
    """[T], one text after the other."""
    offsets: NDArray[np.int64]
    """[len(texts) + 1], into the ids."""
    note: str = ""
    """What else is to be said of the tokenizer."""


def ask(reference: Encoder, texts: list[str]) -> Answers:
    """The ids that Hugging Face tokenizers gives for these texts."""
    return Answers(texts, *reference.encode(texts))


def first_difference(fast: Encoder, answers: Answers) -> str:
    """Where fastokens gives other ids than tokenizers, in words; empty if nowhere.

    It is asked twice, the second time in another order: then it answers from its caches.
    """
    for order in (range(len(answers.texts)), range(len(answers.texts))[::-1]):
        ids, offsets = fast.encode([answers.texts[number] for number in order])
        for place, number in enumerate(order):
            got = ids[offsets[place] : offsets[place + 1]]
            wanted = answers.ids[answers.offsets[number] : answers.offsets[number + 1]]
            if not np.array_equal(wanted, got):
                text = answers.texts[number][:80]
                return f"{text!r}: tokenizers gives {wanted[:12].tolist()}, fastokens {got[:12].tolist()}"
    return ""


class CheckedEncoder:
    """fastokens, each of whose results is compared with that of Hugging Face tokenizers."""

    def __init__(self, fast: Encoder, reference: Encoder) -> None:
        self._fast, self._reference = fast, reference

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids and offsets, as `Encoder.encode` gives them. Raises EnginesDiffer."""
        ids, offsets = self._fast.encode(texts)
        answers = ask(self._reference, texts)
        if not (np.array_equal(ids, answers.ids) and np.array_equal(offsets, answers.offsets)):
            raise EnginesDiffer(first_difference(self._fast, answers) or "ids changed on repetition")
        return ids, offsets


def load_checked_encoder(engine: EngineSpec) -> Encoder:
    """Load a tokenizer, with the comparison that `verify_all` asks for. Raises whatever the library raises."""
    encoder = load_encoder(engine)
    if engine.verify_all and engine.name == "fastokens":
        return CheckedEncoder(encoder, load_encoder(engine.reference))
    return encoder
