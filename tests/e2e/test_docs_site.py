"""Test that mkdocs builds the site without warnings, and that the pages have the same structure as on GitHub."""

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from doc_pages import PAGES, ROOT

pytestmark = pytest.mark.slow
COUNTED = ("h1", "h2", "h3", "h4", "li", "table", "tr", "pre", "strong", "img")
"""Elements that are counted in both renderings of a page."""


class Elements(HTMLParser):
    """Counts the elements of a page, and collects its anchors, links and loaded files."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.counts[tag] += 1
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("img", "script") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site and return its folder. Warnings, such as a missing page, link or anchor, are errors."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture(scope="module")
def built(site) -> dict[Path, Elements]:
    """Return the elements of each page except the error page, whose links are absolute."""
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Elements(path.read_text(encoding="utf-8")) for path in pages}


def page_on_site(site: Path, page: Path) -> Path:
    name = page.relative_to(ROOT / "docs").as_posix()
    return site / re.sub(r"(README)?\.md$", lambda found: "index.html" if found[1] else ".html", name)


def test_every_link_on_the_site_has_a_target(built):
    for path, page in built.items():
        for link in page.links + page.loaded:
            if re.match(r"[a-z]+:", link):
                continue
            name, anchor = urldefrag(link)
            target = Path(os.path.normpath(path.parent / unquote(name))) if name not in ("", ".") else path
            assert target.exists(), f"{path.name}: {link}"
            if anchor and target in built:
                assert unquote(anchor) in built[target].anchors, f"{path.name}: {link}"


def test_site_loads_nothing_from_the_internet(built):
    loaded = [file for page in built.values() for file in page.loaded]
    assert loaded
    assert [file for file in loaded if re.match(r"https?:|//", file)] == []


def test_every_page_of_the_docs_is_rendered_as_on_github(site, built):
    """GitHub and mkdocs differ in nested lists, lists without a blank line before them, and pipes in tables."""
    markdown_it = pytest.importorskip("markdown_it")
    github = markdown_it.MarkdownIt("commonmark").enable("table")
    differences = {}
    for page in PAGES:
        if not page.is_relative_to(ROOT / "docs") or page.name == "api.md":
            continue
        expected = Elements(github.render(page.read_text(encoding="utf-8"))).counts
        html = page_on_site(site, page).read_text(encoding="utf-8")
        start, end = html.index('<div class="section" itemprop="articleBody">'), html.index("<footer")
        found = Elements(html[start:end]).counts
        wrong = {tag: (expected[tag], found[tag]) for tag in COUNTED if expected[tag] != found[tag]}
        if wrong:
            differences[page.name] = wrong
    assert differences == {}


def test_reference_documents_the_names_in_its_tables(site):
    html = (site / "api.html").read_text(encoding="utf-8")
    names = re.findall(
        r"^\| `(slipstream\.[\w.]+)` \|", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M
    )
    assert names
    assert set(names) <= Elements(html).anchors
    assert "batches_per_epoch" in html, "the reference lacks the parameters of `accelerate`"
