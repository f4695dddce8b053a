"""The project's Markdown pages, taken apart: headings, links, code blocks, words in code font, and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHELL_LANGUAGES = ("sh", "bash")
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_SPAN = re.compile(r"(`+)(.+?)\1(?!`)", re.DOTALL)
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")"}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: Page
    line: int
    """Of its first line, from 1."""
    language: str
    """What follows the fence; empty for an indented block."""
    text: str


@dataclass
class Page:
    """A Markdown page; positions are lines counted from 1."""

    path: Path
    headings: list[tuple[int, str]] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    """Words in code font outside of blocks."""
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(REPOSITORY))

    @property
    def anchors(self) -> set[str]:
        """What a link may name after #, as GitHub makes it of headings."""
        found: dict[str, int] = {}
        anchors = set()
        for _, text in self.headings:
            slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()).replace(" ", "-")
            count = found[slug] = found.get(slug, -1) + 1
            anchors.add(f"{slug}-{count}" if count else slug)
        return anchors


@cache
def pages() -> tuple[Page, ...]:
    """All pages of the repository, in order."""
    folders = ("docs", "configs", "containers", "scripts", "tools", "pretraining", "tests", ".github")
    paths = {*REPOSITORY.glob("*.md"), *(path for name in folders for path in (REPOSITORY / name).rglob("*.md"))}
    return tuple(read_page(path) for path in sorted(paths))


def read_page(path: Path) -> Page:
    """Take one page apart."""
    page, prose = Page(path), []
    fence, language, block, start = "", "", [], 0
    after_blank = True
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), "# end"], 1):
        if fence:
            if line.strip().startswith(fence):
                page.blocks.append(Block(page, start, language, "\n".join(block)))
                fence, block = "", []
            else:
                block.append(line)
            continue
        if not block and (match := _FENCE.match(line)):
            fence, language, start = match[1], match[2], number + 1
            continue
        is_code = line.startswith("    ") and (after_blank or bool(block))
        if is_code or (block and not line.strip()):
            start = start if block else number
            block.append(line[4:])
            continue
        if block:
            page.blocks.append(Block(page, start, "", "\n".join(block)))
            block = []
        after_blank = not line.strip() or bool(_HEADING.match(line))
        prose.append((number, line))
    assert not fence, f"{path}: a block of code that nothing closes"
    del prose[-1]
    for number, line in prose:
        if match := _HEADING.match(line):
            page.headings.append((number, match[2].replace("`", "")))
    _read_prose(page, prose)
    return page


def _read_prose(page: Page, prose: list[tuple[int, str]]) -> None:
    """Links and spans, which may go over line ends within a paragraph."""
    paragraph: list[tuple[int, str]] = []
    for number, line in [*prose, (0, "")]:
        if line.strip() and not line.lstrip().startswith("|"):
            paragraph.append((number, line))
            continue
        for part in ([*paragraph], [(number, line)]):
            text = "\n".join(words for _, words in part)
            first = part[0][0] if part else 0
            for match in _SPAN.finditer(text):
                page.spans.append((first + text.count("\n", 0, match.start()), match[2].replace("\n", " ").strip()))
            without_code = _SPAN.sub(lambda match: "\n" * match[0].count("\n"), text)
            for match in _LINK.finditer(without_code):
                page.links.append((first + without_code.count("\n", 0, match.start()), match[1]))
        paragraph = []


@dataclass(frozen=True)
class Command:
    """One simple command of a page: words as a shell splits them."""

    where: str
    words: tuple[str, ...]
    in_shell_block: bool
    """It stands in a block that says it is shell, so all of its lines are commands."""


def commands() -> list[Command]:
    """Every line of the blocks that may hold commands, split at ; | && and so on."""
    found = []
    for page in pages():
        for block in page.blocks:
            if block.language in ("", *SHELL_LANGUAGES):
                found += [
                    Command(f"{page.name}:{number}", words, block.language in SHELL_LANGUAGES)
                    for number, line in _joined_lines(block)
                    for words in simple_commands(line, f"{page.name}:{number}")
                ]
    return found


def _joined_lines(block: Block) -> Iterator[tuple[int, str]]:
    number, joined = block.line, ""
    for offset, line in enumerate(block.text.splitlines()):
        if not joined:
            number = block.line + offset
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        line, joined = joined + line, ""
        if line.strip() and not line.strip().startswith("#"):
            yield number, line


def simple_commands(line: str, where: str) -> list[tuple[str, ...]]:
    """The simple commands of a line, without assignments before them and redirections behind.

    A line that no shell can read gives nothing, unless it names one of this project's commands.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        tokens = list(lexer)
    except ValueError as error:
        assert not re.search(r"(tools|pretraining)/\w+\.py", line), f"{where}: no shell can read this: {error}"
        return []
    parts: list[list[str]] = [[]]
    skip = False
    for token in tokens:
        if skip:
            skip = False
        elif token in _SEPARATORS:
            parts.append([])
        elif set(token) <= set("<>&"):
            skip = True
        else:
            parts[-1].append(token)
    simple = []
    for part in parts:
        while part and _ASSIGNMENT.match(part[0]):
            del part[0]
        if part:
            simple.append(tuple(part))
    return simple
