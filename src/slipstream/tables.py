"""Consoles and text tables. This module imports `rich` without changing the random state."""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


with _unchanged_random_state():  # rich draws a random number when it is imported
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def make_console(stderr: bool = False) -> Console:
    """Return a console for standard output or standard error that does not highlight numbers and strings."""
    return Console(stderr=stderr, highlight=False)


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
