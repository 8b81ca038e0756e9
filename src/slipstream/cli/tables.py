"""Print tables to the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["print_table", "printable"]


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of each character that a terminal cannot display or would interpret.

    File names may contain control characters, and bytes that are not valid UTF-8.
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100, right: Collection[str] = ()
) -> None:
    """Print a table at most as wide as the terminal or `width` columns, whichever is larger; see `make_table`."""
    from rich.console import Console

    from slipstream.tables import make_table

    console = Console()
    Console(width=max(console.width, width), highlight=False).print(make_table(header, rows, right))
