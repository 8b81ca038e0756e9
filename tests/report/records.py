"""Run records for the report tests."""

from html.parser import HTMLParser

from slipstream.report import Curve, PhaseSplit, RunRecord


def curve(values):
    made = Curve()
    for index, value in enumerate(values):
        made.add(index + 1, [value])
    return made


def record(**changes):
    """Return the record of a finished run that spent a third of its training time waiting for data."""
    phases = PhaseSplit(
        {"data": 20.0, "forward": 20.0, "backward": 20.0, "other": 5.0}, {"data": 5.0}, 101, 797
    )
    values = {
        "name": "a_run",
        "status": "finished",
        "started": "2026-01-02 03:04:05",
        "seconds": 70.0,
        "environment": {"torch": "2.13"},
        "settings": {"device": "cpu", "num_workers": 2, "fused": False},
        "step": "eager",
        "iteration": 101,
        "max_iterations": 101,
        "phases": phases,
        "curves": {"train/loss": curve([2.0, 1.0, 0.5]), "val/mIoU": curve([10.0, 30.0, 20.0])},
        "config": {"optim_wrapper.optimizer.lr": 0.1, "train_dataloader.batch_size": 8},
    }
    return RunRecord(**{**values, **changes})


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> does not close the innermost element"

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def text_of(html):
    """Return the text of a page, after checking that all elements are closed and that it contains no scripts."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return " ".join(" ".join(parser.text).split())
