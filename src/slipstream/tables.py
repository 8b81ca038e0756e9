"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["make_table"]


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Table:
    """Return a table whose cells are folded if they do not fit.

    Args:
        header: the names of the columns.
        rows: the cells; brackets are not markup.
        right: the columns that are aligned on the right, such as those with numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in header:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
