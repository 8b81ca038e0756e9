"""The HTML page of one run."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from slipstream.report.advice import (
    NON_TRAINING_PHASES,
    advice,
    has_enough_steps,
    mean_speed,
    training_seconds,
    tuned_text,
)
from slipstream.report.charts import curve_charts, is_per_class
from slipstream.report.classes import confusion_section
from slipstream.report.curve import Curve
from slipstream.report.examples import examples_section
from slipstream.report.record import PNG_SIGNATURE, RunRecord
from slipstream.report.style import document, section, table
from slipstream.report.utilization import utilization, utilization_note
from slipstream.scalars import number

__all__ = ["DESCRIPTIONS", "duration", "page"]

DESCRIPTIONS = {
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
"""Maps the phases of `slipstream.logging.PhaseTimes` to descriptions, in the order in which the page lists them."""
_MAX_IMAGE_BYTES = 4 * 2**20
_STATUS = {
    "finished": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
    "incomplete": "incomplete: still running, or ended before writing its report",
}


def page(record: RunRecord, folder: Path | None = None) -> str:
    """Return the page of a run.

    Args:
        record: the run's record.
        folder: the run's log folder, which may contain an image of predictions.
    """
    sections = [
        _head(record),
        section("Recommendations", _advice(record)),
        section("Time", _time_breakdown(record)),
        section("Curves", curve_charts(record)),
        *(section(*confusion_section(each)) for each in record.confusions),
        section("Predictions", examples_section(record.examples) + _picture(folder)),
        section("Messages", _messages(record)),
        section("Speed options", _options(record)),
        section("Configuration", _config(record)),
    ]
    return document(f"{record.name} – Slipstream report", "\n".join(filter(None, sections)))


def _head(record: RunRecord) -> str:
    status = f'<span class="badge {record.status}">{escape(_STATUS[record.status])}</span>'
    details = [f"started {record.started}" if record.started else "", _progress(record)]
    details += [f"{name} {value}" for name, value in record.environment.items() if name != "world_size"]
    if record.environment.get("world_size", "1") != "1":
        details.append(f"{record.environment['world_size']} processes")
    lines = [
        f"<h1>{escape(record.name)}</h1>",
        f"<p>{status} {escape(' · '.join(f for f in details if f))}</p>",
    ]
    if record.resumed_from:
        inherited = any(curve.x and curve.x[0] < record.start_iteration for curve in record.curves.values())
        text = (
            f"Resumed from {record.resumed_from}, after iteration {record.start_iteration:,}. Earlier iterations are "
            f"in the report of the earlier run{', and in the curves of losses and metrics' if inherited else ''}."
        )
        lines.append(f'<p class="soft">{escape(text)}</p>')
    if record.source == "logs":
        lines.append(
            '<p class="note">This report was generated from the log files, which contain neither the time '
            "breakdown nor the options. Validation metrics are plotted against the logged step, which is the epoch "
            "or the iteration.</p>"
        )
    if record.error:
        lines.append(f'<div class="error"><p class="message">{escape(record.error)}</p></div>')
    return "\n".join([*lines, _tiles(record)])


def _progress(record: RunRecord) -> str:
    total = f" of {record.max_iterations:,}" if record.max_iterations else ""
    text = f"iteration {record.iteration:,}{total}"
    return f"epoch {record.epoch:,} of {record.max_epochs:,}, {text}" if record.max_epochs else text


def _tiles(record: RunRecord) -> str:
    tiles = [
        (name, number(curve.last()), _spread(curve))
        for name, curve in record.curves.items()
        if name.startswith(("val/", "test/")) and not is_per_class(record, name)
    ][:6]
    if (loss := record.curves.get("train/loss")) is not None:
        tiles.append(("train/loss, last step", number(loss.last()), _spread(loss)))
    if (speed := mean_speed(record)) is not None:
        tiles.append(("images/s", number(speed), "mean over training, excluding the first step"))
    if (mfu := utilization(record)) is not None:
        tiles.append(("model FLOPs utilization", f"{mfu:.1%}", f"of the {record.compute.precision} peak"))
    for name, label in (("memory/device_peak_mib", "device memory"), ("memory/host_mib", "host memory")):
        if name in record.curves and (peak := record.curves[name].highest()) is not None:
            tiles.append((label, f"{number(peak, 3)} MiB", "maximum recorded"))
    if record.seconds:
        tiles.append(("duration", duration(record.seconds), ""))
    items = (
        f"<li><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(note)}</small></li>"
        for label, value, note in tiles
    )
    return f'<ul class="tiles">{"".join(items)}</ul>'


def _spread(curve: Curve) -> str:
    """Return the extremes of a curve's values, and the number of values that are NaN or infinite."""
    bad = sum(curve.bad)
    parts = [f"lowest {number(curve.lowest())}", f"highest {number(curve.highest())}"]
    parts = parts if sum(curve.count) + bad > 1 else []
    return ", ".join([*parts, *([f"{bad:,} NaN or infinite"] if bad else [])])


def duration(seconds: float) -> str:
    """Return a duration as a short string: `8.2 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def _advice(record: RunRecord) -> str:
    if record.source == "logs":
        return ""
    texts, tuned = [item.text for item in advice(record)], tuned_text(record)
    if tuned:
        texts.insert(0, tuned)
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        return (
            f'<ul class="advice">{items}</ul><p class="note">Each upper bound assumes that all of the time spent in '
            "the phase is eliminated and that nothing else changes. The bounds of several recommendations cannot be "
            "multiplied.</p>"
        )
    if not has_enough_steps(record):
        steps = record.phases.steps
        return (
            f'<p class="note">None: the run has {steps} training step{"" if steps == 1 else "s"}, too few for a '
            "useful time breakdown.</p>"
        )
    return (
        '<p class="note">None: no phase outside the training step takes much time. This breakdown does not show how '
        "much time a speed option would save in the forward, backward and optimizer phases.</p>"
    )


def _time_breakdown(record: RunRecord) -> str:
    phases = record.phases
    total = training_seconds(record)
    if total <= 0 or not phases.steps:
        return ""
    largest = max(seconds for phase, seconds in phases.seconds.items() if phase not in NON_TRAINING_PHASES)
    rows = []
    for phase, description in DESCRIPTIONS.items():
        seconds, first = phases.seconds.get(phase, 0.0), phases.first.get(phase, 0.0)
        if not seconds and not first:
            continue
        if phase == "step" and record.step and not record.step.startswith("eager"):
            description = f"training step: {record.step}"
        in_training = phase not in NON_TRAINING_PHASES
        per_step = number(1e3 * seconds / (phases.steps - 1), 3) if in_training and phases.steps > 1 else "–"
        bar = f'<span class="bar" style="width:{100 * seconds / largest:.1f}%"></span>' if in_training else ""
        share = f"{seconds / total:.1%}" if in_training else "–"
        rows.append(
            f'<tr><td>{escape(description)}</td><td class="wide">{bar}</td><td class="num">{share}</td>'
            f'<td class="num">{seconds:.4g}</td><td class="num">{per_step}</td>'
            f'<td class="num">{number(1e3 * first, 3)}</td></tr>'
        )
    head = (
        "<tr><th>host time</th><th></th><th class='num'>share</th><th class='num'>seconds</th>"
        "<th class='num'>ms per step</th><th class='num'>first step, ms</th></tr>"
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _time_notes(record))
    return (
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>{notes}'
    )


def _time_notes(record: RunRecord) -> list[str]:
    notes = [
        f"Measured on the host of rank 0 over {record.phases.steps:,} training steps. The first step is listed "
        "separately, because it includes worker startup, memory allocation and compilation. Shares are fractions "
        "of the time spent in training, validation and checkpoints."
    ]
    if record.step:
        notes.append(f"Training step: {record.step}.")
    if record.settings.get("device", "cpu") != "cpu":
        notes.append(
            f"Kernels on the {record.settings['device']} device run asynchronously, and the host does not observe "
            "when they run. Therefore, the forward, backward and optimizer times include only kernel "
            "launches. The time that the host spends waiting for the device counts toward the phase in which "
            "the host waits, usually reading losses."
        )
    if record.settings.get("prefetch"):
        notes.append("With prefetch, the copy to the device starts while the loop waits for data.")
    if "step" in record.phases.seconds and record.settings.get("compile"):
        notes.append(
            "A step compiled as one graph is not split into phases. Its time includes the time for compiling and "
            "verifying the graph, which happens after the first step."
        )
    if note := utilization_note(record):
        notes.append(note)
    return notes


def _picture(folder: Path | None) -> str:
    """Return the newest image of predictions in the run folder as an inline image, or an empty string."""
    if folder is None:
        return ""
    pictures = folder.glob("vis_data/vis_image/predictions_*.png")
    try:
        newest = max(pictures, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or newest.stat().st_size > _MAX_IMAGE_BYTES:
            return ""
        data = newest.read_bytes()
    except OSError:
        return ""
    if not data.startswith(PNG_SIGNATURE):
        return ""
    encoded = base64.b64encode(data).decode("ascii")
    return (
        f'<img alt="Validation images, ground truth and predictions" src="data:image/png;base64,{encoded}">'
    )


def _messages(record: RunRecord) -> str:
    if not record.messages:
        return '<p class="note">No warnings.</p>'
    lines = [
        f'<p class="message">{escape(f"{message.time}  {message.level}  {message.text}")}</p>'
        for message in record.messages
    ]
    if record.dropped_messages:
        count = record.dropped_messages
        lines.append(
            f'<p class="note">{count:,} more message{"s are" if count > 1 else " is"} in the log file.</p>'
        )
    return "\n".join(lines)


def _options(record: RunRecord) -> str:
    if record.source == "logs":
        return ""
    if not record.options:
        return '<p class="note">No speed options are set.</p>'
    rows = [[row.option, row.value, row.source, row.reason] for row in record.options]
    return table(["option", "value", "from", "reason or effect"], rows)


def _config(record: RunRecord) -> str:
    if not record.config:
        return ""
    rows = [[key, "" if value is None else str(value)] for key, value in sorted(record.config.items())]
    return f"<details><summary>{len(rows):,} values</summary>{table(['key', 'value'], rows)}</details>"
