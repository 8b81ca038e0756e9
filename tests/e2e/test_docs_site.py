"""Test that mkdocs builds the site without warnings, and that the pages have the same structure as on GitHub."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from doc_pages import ROOT

pytestmark = pytest.mark.slow


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
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


def test_reference_documents_the_names_in_its_tables(site):
    html = (site / "api.html").read_text(encoding="utf-8")
    names = re.findall(
        r"^\| `(slipstream\.[\w.]+)` \|", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M
    )
    assert names
    assert set(names) <= Elements(html).anchors
    assert "batches_per_epoch" in html, "the reference lacks the parameters of `accelerate`"
