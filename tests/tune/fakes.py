"""Fake trials that report scripted values and do not start a process."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from slipstream.speed import Capabilities
from slipstream.tune.process import TrialError


def alive(pid):
    """Return whether a process is running. A zombie is not running."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@dataclass
class Script:
    """The values that one trial reports."""

    seconds: float = 0.1
    """Step time."""
    losses: tuple = (2.0, 1.5, 1.0)
    error: TrialError | None = None
    problem: str | None = None
    compile_seconds: float = 0.0
    sources: dict = field(default_factory=dict)
    peak_mib: float = 100.0
    accumulate: int = 1
    buffered: int = 0
    fail_when_timed: BaseException | None = None
    shapes: int = 1


class FakeProcess:
    """A mock of `Process` whose job is a `Script`."""

    started = 0
    ended = 0
    requests: ClassVar = []

    def __init__(self, job, make_observer=None):
        type(self).started += 1
        self.script = job
        self.warmup_seconds = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        type(self).ended += 1

    def wait_for(self, event, seconds):
        script = self.script
        if script.error is not None:
            raise script.error
        self.warmup_seconds = [script.seconds + script.compile_seconds] + [script.seconds] * 7
        return {
            "losses": list(script.losses),
            "peak_mib": script.peak_mib,
            "problem": script.problem,
            "capabilities": Capabilities(),
            "sources": script.sources,
            "steps_per_epoch": 100,
            "num_workers": 0,
            "shapes": script.shapes,
            "buffered": self.script.buffered,
            "accumulate": self.script.accumulate,
        }

    def time(self, steps, untimed, seconds):
        if self.script.fail_when_timed is not None:
            raise self.script.fail_when_timed
        type(self).requests.append((steps, untimed))
        return {"seconds": self.script.seconds, "peak_mib": self.script.peak_mib}
