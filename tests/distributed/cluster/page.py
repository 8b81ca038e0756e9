"""The code blocks in docs/distributed.md, which the tests run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cluster.machines import ROOT

ENGLISH = ROOT / "docs/distributed.md"


@dataclass(frozen=True)
class Block:
    """A fenced code block with its heading, language and text."""

    section: str
    language: str
    text: str


def blocks(page: Path = ENGLISH) -> list[Block]:
    """Return the code blocks of a page in order."""
    parts = re.split(r"^(## [^\n]*|```\w*\n.*?^```)$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found, section = [], ""
    for part in parts[1::2]:
        if part.startswith("## "):
            section = part[3:]
        else:
            language, text = part[3:-3].split("\n", 1)
            found.append(Block(section, language, text))
    return found


def commands(section: str) -> list[str]:
    """Return the shell blocks in a section of the English page. Fail if the section has none."""
    found = [block.text for block in blocks() if (block.section, block.language) == (section, "bash")]
    assert found, f"no commands under '{section}' in {ENGLISH}"
    return found
