"""Text for benchmarks from installed packages: English, Japanese, Chinese, Korean and code in equal shares.

English: Python's language reference (pydoc_data.topics) and the descriptions of installed packages. Code: the
standard library and site-packages. The others: Debian's manpages-ja, manpages-ja-dev, manpages-zh, gimp-help-ko
and debian-faq-ko. When a language has less than its share, its documents come again with their lines in
another order.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

NEEDED = "apt-get install --no-install-recommends manpages-ja manpages-ja-dev manpages-zh gimp-help-ko debian-faq-ko"
CODE_BYTES = 60_000_000


def english() -> Iterator[str]:
    """Prose."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for distribution in importlib.metadata.distributions():
        description = distribution.read_text("METADATA")
        if description and "\n\n" in description:
            yield description.split("\n\n", 1)[1]


def code() -> Iterator[str]:
    """Python files of the standard library and of installed packages."""
    room = CODE_BYTES
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(errors="ignore")
            room -= len(text)
            yield text
            if room < 0:
                return


def man_pages(language: str) -> Callable[[], Iterator[str]]:
    """Manual pages without their markup."""

    def read() -> Iterator[str]:
        for path in sorted(Path("/usr/share/man", language).rglob("*.gz")):
            lines = gzip.decompress(path.read_bytes()).decode(errors="ignore").splitlines()
            text = "\n".join(re.sub(r"\\f.|\\-|\\&", "", line) for line in lines if line[:1] not in (".", "'"))
            if any(ord(character) > 0x2E80 for character in text):
                yield text

    return read


def korean() -> Iterator[str]:
    """GIMP's manual and Debian's questions and answers."""
    for path in sorted(Path("/usr/share/gimp/2.0/help/ko").rglob("*.html")):
        yield _visible_text(path.read_text(errors="ignore"))
    for path in sorted(Path("/usr/share/doc/debian/FAQ/ko").rglob("*.html")):
        yield _visible_text(path.read_text(errors="ignore"))


class _Visible(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.parts.append(" ".join(data.split()))


def _visible_text(page: str) -> str:
    parser = _Visible()
    parser.feed(page)
    return "\n".join(parser.parts)


LANGUAGES: dict[str, Callable[[], Iterator[str]]] = {
    "en": english,
    "ja": man_pages("ja"),
    "zh": man_pages("zh_CN"),
    "ko": korean,
    "code": code,
}


def write_corpus(path: Path, num_bytes: int, seed: int = 0) -> dict[str, int]:
    """Write JSON Lines of about `num_bytes` of text, languages shuffled; gives the distinct bytes of each.

    Documents are cut at about 8,000 characters. Kept if it is there already.
    """
    facts = path.with_suffix(".facts.json")
    if path.exists() and facts.exists():
        return json.loads(facts.read_text())
    generator = random.Random(seed)
    documents, distinct = [], {}
    for language, read in LANGUAGES.items():
        pieces = [piece for text in read() for piece in _cut(text)]
        if not pieces:
            raise SystemExit(f"no {language} text on this machine; it needs: {NEEDED}")
        distinct[language] = sum(len(piece.encode()) for piece in pieces)
        room = num_bytes // len(LANGUAGES)
        while room > 0:
            for piece in pieces:
                documents.append({"text": piece, "meta": {"language": language}})
                room -= len(piece.encode())
                if room <= 0:
                    break
            pieces = ["\n".join(_shuffled(piece.split("\n"), generator)) for piece in pieces]
    generator.shuffle(documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    facts.write_text(json.dumps(distinct))
    return distinct


def _cut(text: str) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line in text.split("\n"):
        piece.append(line)
        size += len(line) + 1
        if size > 8000:
            yield "\n".join(piece)
            piece, size = [], 0
    if size > 100:
        yield "\n".join(piece)


def _shuffled(lines: list[str], generator: random.Random) -> list[str]:
    lines = list(lines)
    generator.shuffle(lines)
    return lines


if __name__ == "__main__":
    print(write_corpus(Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6)))
