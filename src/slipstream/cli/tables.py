"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["print_table", "printable"]


def printable(text: str) -> str:
    """Return text in which characters that a terminal cannot display, or would interpret, are replaced.

    Names of files may contain bytes that are not UTF-8, and control characters.
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> None:
    """Print a table, at least `width` characters wide if the terminal is narrower."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets are not markup
    console = Console()
    Console(width=max(console.width, width), highlight=False).print(table)
