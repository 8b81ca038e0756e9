"""Print tables to the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

# A width in columns that no table reaches.
_UNLIMITED = 100_000


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of each character that a terminal cannot display or would interpret.

    File names may contain control characters, and bytes that are not valid UTF-8.
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = 100, right: Collection[str] = ()
) -> None:
    """Print a table at most as wide as the terminal or `width` columns, whichever is larger; see `make_table`.

    If `width` is None, the table is at most as wide as the terminal; if the output is not a terminal, for example a
    pipe, no cell is wrapped.
    """
    from rich.console import Console

    from slipstream.tables import make_table

    console = Console()
    if width is None:
        width = 0 if console.is_terminal else _UNLIMITED
    Console(width=max(console.width, width), highlight=False).print(make_table(header, rows, right))
