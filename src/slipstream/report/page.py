"""The HTML page of one run."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from slipstream.report.advice import advice, has_enough_steps, tuning
from slipstream.report.chart import line_chart
from slipstream.report.record import NON_TRAINING_PHASES, Confusion, Curve, RunRecord
from slipstream.scalars import number

# Maps the phases of `slipstream.logging.PhaseTimes` to descriptions, in the order in which the page lists them.
_DESCRIPTIONS = {
    "data": "waiting for data",
    "preprocess": "data preprocessor: copy to the device, normalization",
    "forward": "forward",
    "backward": "backward, with gradient synchronization",
    "optimizer": "optimizer, with clipping and zero_grad",
    "step": "rest of the training step",
    "hooks": "hooks",
    "logging": "reading losses, writing log lines",
    "validation": "validation",
    "test": "test",
    "checkpoint": "checkpoints",
    "other": "start and end of the run",
}
_MAX_CONFUSIONS = 15
_MAX_IMAGE_BYTES = 4 * 2**20
_STYLE = """
:root{color-scheme:light dark;--card:#8881;--soft:#888;--rule:#8885}
body{margin:0 auto;max-width:1180px;padding:24px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h2{margin:32px 0 10px;border-bottom:1px solid var(--rule)} h3{font-size:14px;margin:0 0 4px} p{margin:6px 0}
.note,small{color:var(--soft)} .finished{color:#0a7d43} .failed{color:#c62f26} .interrupted,.incomplete{color:#a86500}
ul{padding:0;list-style:none} .advice{padding-left:20px;list-style:disc} pre{white-space:pre-wrap;margin:2px 0}
.tiles,.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr))}
.tiles li,figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles li,figure{padding:8px 12px}
.tiles b{display:block;font-size:20px} .tiles small{display:block}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)} th{color:var(--soft)}
.num{text-align:right;white-space:nowrap} .wide{width:38%}
.bar{display:block;height:12px;margin-top:5px;background:#2a6fb0;border-radius:2px} img{max-width:100%}
"""


def page(record: RunRecord, folder: Path | None = None) -> str:
    """Return the page of a run, without scripts or external resources.

    Args:
        record: the run's record.
        folder: the run's log folder, which may contain an image of predictions.
    """
    sections = [
        ("Recommendations", _advice(record)),
        ("Time", _time_breakdown(record)),
        ("Curves", _curves(record)),
        *((f"Classes ({each.metric}, {each.mode})", _classes(each)) for each in record.confusions),
        ("Predictions", _picture(folder)),
        ("Messages", "".join(f"<pre>{escape(f'{m.time} {m.level} {m.text}')}</pre>" for m in record.messages)),
        ("Speed options", _table(["option", "value", "from", "reason or effect"], [
            [row.option, row.value, row.source, row.reason] for row in record.options])),
        ("Configuration", _config(record)),
    ]  # fmt: skip
    body = "".join(
        f"<section><h2>{escape(title)}</h2>\n{html}</section>\n" for title, html in sections if html
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(record.name)} – Slipstream report</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{_head(record)}\n{body}</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 99) -> str:
    """Return an HTML table, or an empty string if it has no rows. Columns from index `numeric` are right-aligned."""

    def cells(tag: str, row: Sequence[str]) -> str:
        numbers = [' class="num"' if index >= numeric else "" for index in range(len(row))]
        return "".join(
            f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(numbers, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    )


def _head(record: RunRecord) -> str:
    total = f" of {record.max_iterations:,}" if record.max_iterations else ""
    details = [
        f"started {record.started}" if record.started else "",
        f"iteration {record.iteration:,}{total}",
    ]
    if record.max_epochs:
        details.append(f"epoch {record.epoch:,} of {record.max_epochs:,}")
    if record.resumed_from:
        details.append(f"resumed from {record.resumed_from} after iteration {record.start_iteration:,}")
    if record.source == "logs":
        details.append("generated from the log files, so metrics are plotted against the logged step")
    details += [f"{name} {value}" for name, value in record.environment.items()]
    tiles = [
        (name, number(curve.newest), _spread(curve))
        for name, curve in record.curves.items()
        if _is_metric(record, name)
    ][:6]
    if (loss := record.curves.get("train/loss")) is not None:
        tiles.append(("train/loss, last step", number(loss.newest), _spread(loss)))
    if (speed := record.images_per_second) is not None:
        tiles.append(("images/s", number(speed), "mean, without the first step"))
    for name, label in (("memory/device_peak_mib", "device memory"), ("memory/host_mib", "host memory")):
        if name in record.curves:
            tiles.append((label, f"{number(record.curves[name].highest(), 3)} MiB", "maximum recorded"))
    minutes, seconds = divmod(record.seconds, 60)
    tiles.append(("duration", f"{minutes:.0f} min {seconds:.1f} s" if minutes else f"{seconds:.1f} s", ""))
    items = "".join(
        f"<li>{escape(label)}<b>{escape(value)}</b><small>{escape(note)}</small></li>"
        for label, value, note in tiles
    )
    error = f'<pre class="failed">{escape(record.error)}</pre>' if record.error else ""
    return (
        f'<h1>{escape(record.name)}</h1><p><b class="{escape(record.status)}">{escape(record.status)}</b> · '
        f'{escape(" · ".join(filter(None, details)))}</p>{error}<ul class="tiles">{items}</ul>'
    )  # fmt: skip


def _is_metric(record: RunRecord, name: str) -> bool:
    """Return whether a scalar is a metric that is not a row of the class table, such as `val/IoU/road`."""
    classes = record.confusions[0].classes if record.confusions else ()
    return name.startswith(("val/", "test/")) and not any(name.endswith(f"IoU/{each}") for each in classes)


def _spread(curve: Curve) -> str:
    parts = [f"lowest {number(curve.lowest())}", f"highest {number(curve.highest())}"]
    return ", ".join(parts + ([f"{curve.bad:,} NaN or infinite"] if curve.bad else []))


def _advice(record: RunRecord) -> str:
    if record.source == "logs":
        return ""
    texts = [*(item.text for item in advice(record)), *filter(None, [tuning(record)])]
    if items := "".join(f"<li>{escape(text)}</li>" for text in texts):
        return f'<ul class="advice">{items}</ul><p class="note">The bounds cannot be multiplied.</p>'
    if has_enough_steps(record):
        return '<p class="note">None: no phase outside the training step takes much time.</p>'
    return '<p class="note">None: the run has too few steps for a useful time breakdown.</p>'


def _time_breakdown(record: RunRecord) -> str:
    phases, total = record.phases, record.training_seconds
    if total <= 0 or not phases.steps:
        return ""
    largest, rows = max(phases.seconds.values()), []
    for phase, description in _DESCRIPTIONS.items():
        seconds, first = phases.seconds.get(phase, 0.0), phases.first.get(phase, 0.0)
        if not seconds and not first:
            continue
        in_training = phase not in NON_TRAINING_PHASES
        values = (
            f"{seconds / total:.1%}" if in_training else "–",
            f"{seconds:.4g}",
            number(1e3 * seconds / (phases.steps - 1), 3) if in_training and phases.steps > 1 else "–",
            number(1e3 * first, 3),
        )
        bar = f'<span class="bar" style="width:{100 * seconds / largest:.1f}%"></span>'
        cells = "".join(f'<td class="num">{value}</td>' for value in values)
        rows.append(f'<tr><td>{escape(description)}</td><td class="wide">{bar}</td>{cells}</tr>')
    heads = "".join(
        f'<th class="num">{name}</th>' for name in ("share", "seconds", "ms per step", "first step, ms")
    )
    notes = [
        f"Measured on the host of rank 0 over {phases.steps:,} steps, without the first. Training step: {record.step}."
    ]
    if record.settings.get("device", "cpu") != "cpu":
        notes.append(
            "Kernels run asynchronously, so forward, backward and optimizer include only kernel launches. The time "
            "that the host waits for the device counts toward the phase in which it waits, usually reading losses."
        )
    if record.settings.get("compile"):
        notes.append(
            "A step compiled as one graph is not split; its time includes compilation after the first step."
        )
    return (
        f"<table><thead><tr><th>host time</th><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    )


def _curves(record: RunRecord) -> str:
    def rank(name: str) -> tuple[bool, bool]:
        return name != "train/loss", not name.startswith(("val/", "test/"))

    names = sorted(
        (n for n in record.curves if n.startswith(("train/", "speed/", "memory/")) or _is_metric(record, n)),
        key=rank,
    )
    charts = [
        f"<figure><h3>{escape(name)}</h3>{svg}</figure>"
        for name in names
        if (svg := line_chart(name, record.curves[name]))
    ]
    note = "Lines are means since the previous point; bands show the minimum and maximum. The x axis counts iterations."
    return f'<div class="charts">{"".join(charts)}</div><p class="note">{note}</p>' if charts else ""


def _classes(confusion: Confusion) -> str:
    """Return the results of each class and the most frequent confusions."""

    def percent(part: int, total: int) -> str:
        return f"{100 * part / total:.1f}" if total else "–"

    matrix, names = confusion.matrix, confusion.classes
    targets, guesses = [sum(row) for row in matrix], [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for i, name in enumerate(names):
        hit, truth, guess = matrix[i][i], targets[i], guesses[i]
        shares = (
            percent(truth, sum(targets)),
            percent(hit, truth + guess - hit),
            percent(hit, guess),
            percent(hit, truth),
        )
        rows.append([name, *shares, f"{truth:,}"])
    wrong = [(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j and n]
    wrong = sorted(wrong, reverse=True)[:_MAX_CONFUSIONS]
    confused = [[names[i], names[j], f"{n:,}", percent(n, targets[i])] for n, i, j in wrong]
    return (
        _table(["class", "share %", "IoU %", "precision %", "recall %", "targets"], rows, 1)
        + ("<h3>Most frequent confusions</h3>" if confused else "")
        + _table(["target", "predicted as", "count", "% of target"], confused, 2)
    )


def _picture(folder: Path | None) -> str:
    """Return the newest image of predictions in the run folder as an inline image, or an empty string."""
    pictures = folder.glob("vis_data/vis_image/predictions_*.png") if folder else ()
    newest = max(pictures, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or newest.stat().st_size > _MAX_IMAGE_BYTES:
        return ""
    data = base64.b64encode(newest.read_bytes()).decode("ascii")
    return f'<img alt="Validation images, ground truth and predictions" src="data:image/png;base64,{data}">'


def _config(record: RunRecord) -> str:
    rows = [[key, str(value)] for key, value in sorted(record.config.items())]
    return (
        f"<details><summary>{len(rows):,} values</summary>{_table(['key', 'value'], rows)}</details>"
        if rows
        else ""
    )
