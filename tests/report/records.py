"""Run records for the report tests."""

from html.parser import HTMLParser

from slipstream.report import Curve, PhaseSplit, RunRecord

_VOID = {"meta", "img", "br"}


def curve(values, limit=1000):
    made = Curve(limit)
    for index, value in enumerate(values):
        made.add(index + 1, [value])
    return made


def record(**changes):
    """Return the record of a finished run that spent a third of its training time waiting for data."""
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
        "samples_per_step": 8,
        "phases": PhaseSplit(
            {"data": 20.0, "forward": 20.0, "backward": 20.0, "other": 5.0}, {"data": 5.0}, 101, 797
        ),
        "curves": {"train/loss": curve([2.0, 1.0, 0.5]), "val/mIoU": curve([10.0, 30.0, 20.0])},
        "config": {"optim_wrapper.optimizer.lr": 0.1, "train_dataloader.batch_size": 8},
    }
    return RunRecord(**{**values, **changes})


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> does not close the innermost element"

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def parsed(html):
    """Parse a page, and check that all elements are closed and that the page loads no resources. Return the parser."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert not {"script", "link", "iframe", "object", "embed"} & set(parser.tags)
    for name, value in parser.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "src") or value.startswith("data:image/png;base64,")
    assert "url(" not in html
    assert "@import" not in html
    return parser


def text_of(html):
    return " ".join(parsed(html).text)
