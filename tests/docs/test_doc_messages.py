"""The messages that docs/troubleshooting.md explains are those of the source, word for word."""

from __future__ import annotations

import re

from doc_pages import REPOSITORY, read_page
from source_messages import messages

PAGE = REPOSITORY / "docs/troubleshooting.md"
_ENTRY = re.compile(r"^### (.+)$", re.MULTILINE)


def entries() -> list[tuple[str, str]]:
    """(message, what the page says about it) of every entry."""
    parts = re.split(r"^#{2,3} (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = set(_ENTRY.findall(PAGE.read_text(encoding="utf-8")))
    return [(title.strip("`"), body) for title, body in zip(parts[1::2], parts[2::2], strict=True) if title in titles]


def test_every_message_stands_in_the_source() -> None:
    said = messages()
    stale = [message for message, _ in entries() if not any(message in text for text in said)]
    assert len(entries()) >= 40
    assert not stale, "no text of the source holds:\n" + "\n".join(stale)


def test_every_entry_says_why_and_what_to_do() -> None:
    thin = [message for message, body in entries() if "**Do:**" not in body or len(body.split()) < 12]
    assert not thin, "\n".join(thin)


def test_no_message_is_explained_twice() -> None:
    found = [message for message, _ in entries()]
    assert len(found) == len(set(found))
    assert len(read_page(PAGE).anchors) >= len(found)


def test_a_changed_message_is_noticed() -> None:
    said = messages()
    assert any("this experiment is running already" in text for text in said)
    assert not any("this experiment is already running" in text for text in said)
