"""The pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IN_ORDER = "<!-- python: in order -->"
"""HTML comment that marks a page whose Python blocks share one namespace."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--\s*((?:(?!-->).)*?)\s*-->\n\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block on a page."""

    page: str
    """Path from the root folder."""
    line: int
    """Line of the opening fence."""
    language: str
    text: str
    comment: str
    """The HTML comment directly before the fence, or ''."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the block can run. A block after "not run: requires MODULE" can run if the module is installed."""
        required = re.fullmatch(r"not run: requires (\w+)", self.comment)
        return find_spec(required[1]) is not None if required else not self.comment.startswith("not run")


def text_of(page: str) -> str:
    """Return a page's text, given its path from the root folder."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str | None = None, page: str | None = None) -> list[Block]:
    """Return the fenced blocks of all pages or of one page, in all languages or in one language."""
    found = []
    for path in PAGES:
        name = path.relative_to(ROOT).as_posix()
        if page not in (None, name):
            continue
        text = text_of(name)
        for match in _FENCE.finditer(text):
            before = text[: match.start()]
            comment = _COMMENT.search(before)
            note = comment[1] if comment else ""
            found.append(Block(name, before.count("\n") + 1, match[1], match[2], note))
    return [block for block in found if language in (None, block.language)]


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block, with continued lines joined and comments removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"\s+#.*|^#.*", "", line).strip() for line in lines) if line]
