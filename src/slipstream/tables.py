"""Text tables."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["make_table", "table_text"]


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Table:
    """Return a table whose cells wrap if they do not fit.

    Args:
        header: the column names.
        rows: the cells of each row; brackets are not interpreted as markup.
        right: the names of the columns to right-align, such as numeric columns.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in header:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def table_text(table: Table) -> str:
    """Return a table as a string that is at most 140 columns wide."""
    file = io.StringIO()
    Console(file=file, width=140, highlight=False).print(table)
    return file.getvalue()
