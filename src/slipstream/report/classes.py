"""The per-class table and the confusion matrix of one metric."""

from __future__ import annotations

from html import escape

from slipstream.report.record import Confusion
from slipstream.report.style import table

__all__ = ["class_rows", "confusion_section"]

_MAX_MATRIX_CLASSES = 30
"""Maximum number of classes for which the full matrix is shown."""
_MAX_CONFUSIONS = 15
"""Maximum number of rows in the table of the most frequent confusions."""


def class_rows(confusion: Confusion) -> list[list[str]]:
    """Return a row of strings per class: name; share of targets, IoU, precision and recall in percent; target count."""
    matrix = confusion.matrix
    truth = [sum(row) for row in matrix]
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    total = sum(truth)
    rows = []
    for index, name in enumerate(confusion.classes):
        hit, targets, guesses = matrix[index][index], truth[index], predicted[index]
        union = targets + guesses - hit
        values = (
            _percent(targets, total),
            _percent(hit, union),
            _percent(hit, guesses),
            _percent(hit, targets),
        )
        rows.append([name, *values, f"{targets:,}"])
    return rows


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f}" if total else "–"


def confusion_section(confusion: Confusion) -> tuple[str, str]:
    """Return the title and the HTML of the section for a confusion matrix."""
    title = f"Classes ({confusion.metric}, {confusion.mode} after iteration {confusion.iteration:,})"
    header = ["class", "share %", "IoU %", "precision %", "recall %", "targets"]
    classes = table(header, class_rows(confusion), (1, 2, 3, 4, 5))
    note = (
        '<p class="note">Share: fraction of all targets. A dash means that a value is undefined, because the number '
        "of targets or predictions in its denominator is zero.</p>"
    )
    small = len(confusion.classes) <= _MAX_MATRIX_CLASSES
    return title, classes + note + (_matrix(confusion) if small else "") + _most_frequent(confusion)


def _matrix(confusion: Confusion) -> str:
    """Return the matrix as a table; each cell is a percentage of the sum of its row."""
    names = [escape(name) for name in confusion.classes]
    head = "".join(f"<th>{index}</th>" for index in range(len(names)))
    rows = []
    for index, (name, row) in enumerate(zip(names, confusion.matrix, strict=True)):
        total = sum(row)
        cells = "".join(_cell(value, total, index == column) for column, value in enumerate(row))
        rows.append(f"<tr><th>{name} {index}</th>{cells}</tr>")
    return (
        "<h3>Confusion matrix: percentage of each row's targets that are predicted as the column's class</h3>"
        f'<div class="scroll"><table class="matrix"><thead><tr><th>target \\ predicted</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: int, total: int, is_hit: bool) -> str:
    share = value / total if total else 0.0
    mark = ' class="hit"' if is_hit else ""
    shade = f' style="background:rgba(var(--cell),{0.55 * share:.2f})"' if share >= 0.01 else ""
    text = "–" if not total else "" if not value else f"{100 * share:.0f}" if share >= 0.005 else "&lt;1"
    return f"<td{mark}{shade}>{text}</td>"


def _most_frequent(confusion: Confusion) -> str:
    """Return a table of the most frequent confusions."""
    names, matrix = confusion.classes, confusion.matrix
    pairs = [
        (value, target, guess)
        for target, row in enumerate(matrix)
        for guess, value in enumerate(row)
        if target != guess and value
    ]
    rows = [
        [names[target], names[guess], f"{value:,}", _percent(value, sum(matrix[target]))]
        for value, target, guess in sorted(pairs, reverse=True)[:_MAX_CONFUSIONS]
    ]
    if not rows:
        return ""
    body = table(["target", "predicted as", "count", "% of target class"], rows, (2, 3))
    return f"<details><summary>Most frequent confusions</summary>{body}</details>"
