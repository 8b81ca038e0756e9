"""Test that every relative link in the README and in docs/ points to an existing file and heading."""

import re
import unicodedata
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """Return a page without fenced blocks and inline code, where brackets are not links."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        kept = "".join(
            c for c in plain if c in "-_ " or unicodedata.category(c)[0] in "LN" or c.isalnum()
        ).replace(" ", "-")
        count = found.get(kept, 0)
        found[kept] = count + 1
        if count:
            found[f"{kept}-{count}"] = 1
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_resolve(page):
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(path), f"{link}: no such heading"


def test_index_links_to_every_page():
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    folders = {
        ROOT / "docs" / folder for folder in ("options", "supergradients")
    }  # these folders have separate indexes
    assert (
        pages - {index} - {page for page in pages if page.parent in folders and page.name != "README.md"}
        <= linked
    )


@pytest.mark.parametrize("folder", ["options", "supergradients"])
def test_index_of_each_folder_links_to_every_page(folder):
    index = ROOT / "docs" / folder / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {page.name for page in index.parent.glob("*.md")} - {"README.md"} <= linked
