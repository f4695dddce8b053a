"""Every relative link and anchor of the pages leads somewhere, and the index of docs/ lists every page."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from doc_pages import REPOSITORY, Page, pages, read_page


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Page) -> None:
    broken = []
    for line, target in page.links:
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists() or not path.is_relative_to(REPOSITORY):
            broken.append(f"{page.name}:{line}: {target}: no such file")
        elif anchor and (path.suffix != ".md" or anchor not in read_page(path).anchors):
            broken.append(f"{page.name}:{line}: {target}: no such heading")
    assert not broken, "\n".join(broken)


def test_the_index_lists_every_page_of_docs_on_a_line_of_its_own() -> None:
    index = read_page(REPOSITORY / "docs/README.md")
    linked = [target for _, target in index.links if "/" not in target]
    lines = [line for line, target in index.links if "/" not in target]
    here = {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert here - set(linked) == set()
    assert len(lines) == len(set(lines))
