"""MkDocs hooks that make the pages in docs/ work both on GitHub and on the site.

- Links to files outside docs/ work on GitHub. On the site, these files are pages below `repository/`, and the links are
  changed accordingly. The Markdown files among them can link to further files.
- The comment `<!-- api -->` after a table is invisible on GitHub. On the site, it is replaced by the signatures and
  docstrings of the Python objects in the first column of the table.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"
"""Site folder that contains the files from outside docs/."""

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_API = "<!-- api -->"
_NAME = re.compile(r"^\| `(slipstream\.[\w.]+)` \|", re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and the style sheet for highlighted code."""
    pending = [path for file in files if file.is_documentation_page() for path in _external_files(file)]
    while pending:
        path = pending.pop()
        uri = _site_uri(path)
        if files.get_file_from_path(uri):
            continue
        file = File.generated(config, uri, content=_markdown_of(path))
        files.append(file)
        if path.suffix == ".md":
            pending += _external_files(file)
    style = HtmlFormatter().get_style_defs(".highlight")
    files.append(File.generated(config, "pygments.css", content=style))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change the links between docs/ and other folders, and insert the API reference."""
    source = _source(page.file)
    parts = _FENCE.split(markdown)  # the odd parts are fenced blocks
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(lambda match: _site_link(match[0], source, page.file), parts[i])
    *tables, rest = "".join(parts).split(_API)
    return "".join(table + _directives(table) for table in tables) + rest


def _directives(table: str) -> str:
    """Return mkdocstrings directives for the Python objects in a table."""
    return "\n\n".join(f"::: {name}" for name in _NAME.findall(table))


def _external_files(file: File) -> Iterator[Path]:
    """Yield the files outside docs/ that a page links to."""
    source = _source(file)
    for part in _FENCE.split(file.content_string)[::2]:
        for link in _LINK.findall(part):
            path = _target(link, source)
            if path is not None and not path.is_relative_to(ROOT / "docs"):
                yield path


def _source(file: File) -> Path:
    """Return the repository file from which a page is generated."""
    parts = PurePosixPath(file.src_uri).parts
    if parts[0] != FOLDER:
        return ROOT / "docs" / file.src_uri
    path = ROOT.joinpath(*parts[1:])
    return path if path.exists() else path.with_suffix("")


def _target(link: str, source: Path) -> Path | None:
    """Return the repository file that a link refers to, or None if the link refers to something else."""
    path = Path(os.path.normpath(source.parent / link))
    if path.is_dir():
        path /= "README.md"
    return path if path.is_relative_to(ROOT) and path.is_file() else None


def _site_uri(path: Path) -> str:
    """Return the path of a repository file in the site's sources."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(ROOT / "docs"):
        return name.removeprefix("docs/")
    return f"{FOLDER}/{name}" if path.suffix == ".md" else f"{FOLDER}/{name}.md"


def _site_link(link: str, source: Path, file: File) -> str:
    """Return the link that replaces a link in `file` on the site."""
    path = _target(link, source)
    if path is None:
        return link
    return os.path.relpath(_site_uri(path), PurePosixPath(file.src_uri).parent)


def _markdown_of(path: Path) -> str:
    """Return the Markdown of a file outside docs/. A file that is not Markdown is shown as a code block."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n~~~~ {language}\n{text}~~~~\n"
