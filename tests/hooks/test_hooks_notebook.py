"""Tests of the table that a run displays in a notebook, with a mock of IPython."""

import base64
import math
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest

from slipstream.hooks import NotebookHook, in_notebook
from slipstream.runner import Runner
from tiny_runs import Scripted, run, training, validation


@pytest.fixture
def outputs(monkeypatch):
    """Simulate a notebook. Return the outputs of its cell."""
    found = []

    def display(content, raw, display_id):
        found.append([content])
        return SimpleNamespace(update=lambda content, raw: found[-1].append(content))

    python, shown = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = lambda: SimpleNamespace(kernel=object())
    shown.display = display
    for name, module in {
        "ipykernel": ModuleType("ipykernel"),
        "IPython": python,
        "IPython.display": shown,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("slipstream.hooks.notebook._SECONDS_BETWEEN_DRAWS", 0.0)
    return found


def charts(html):
    """Return the charts in an output by name, as parsed SVG."""
    images = re.findall(r'<img alt="(.*?)" .*?base64,(.*?)">', html)
    return {name: ElementTree.fromstring(base64.b64decode(data)) for name, data in images}


def test_run_in_a_notebook_updates_one_output(tmp_path, outputs):
    assert in_notebook()
    runner = run(tmp_path, **validation(), default_hooks=dict(logger=dict(type="LoggerHook", interval=1)))
    ((first, *others),) = outputs
    assert "0 of 10" in first["text/html"]
    last = others[-1]
    loss = runner.message_hub.get_scalar("train/loss").mean(10)
    assert f"loss {loss:.4g}".rstrip("0") in last["text/plain"]
    for text in ("iteration 10 of 10", "lr 0.1", "acc 0.", "images/s", "waiting for data"):
        assert text in last["text/plain"]
    for text in ("<td>10 of 10</td>", "<th>lr</th><th>acc</th><th>images/s</th><th>waiting for data</th>"):
        assert text in last["text/html"]
    assert len(others) >= 10
    drawn = charts(last["text/html"])
    assert list(drawn) == ["train/loss", "val/acc"]
    (line,) = [each for each in drawn["train/loss"].iter() if each.tag.endswith("polyline")]
    assert len(line.get("points").split()) == 10


def test_names_and_nan_are_shown_as_text(tmp_path, outputs):
    metric = dict(type=Scripted, values=[math.nan, math.nan], name='<b>&"')
    run(tmp_path, **validation(metric))
    html = outputs[0][-1]["text/html"]
    assert "<th>&lt;b&gt;&amp;&quot;</th>" in html
    assert "<td>NaN</td>" in html
    assert "<b>" not in html


def test_second_run_has_its_own_output(tmp_path, outputs):
    runner = Runner(**training(tmp_path))
    runner.train()
    run(tmp_path / "second")
    assert len(outputs) == 2


def test_outside_a_notebook_nothing_is_imported(tmp_path):
    runner = run(tmp_path)
    assert not in_notebook()
    assert not any(isinstance(hook, NotebookHook) for hook in runner.hooks)
    code = "import sys, slipstream.runner; print({'IPython', 'ipykernel'} & set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout.strip() == "set()"


def test_ipython_shell_without_a_kernel_is_not_a_notebook(outputs):
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace()
    assert not in_notebook()
    sys.modules["IPython"].get_ipython = lambda: None
    assert not in_notebook()
