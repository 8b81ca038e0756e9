"""Test that the cells of docs/notebook.ipynb run without Jupyter, and that the notebook contains their outputs."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import make_notebook


@pytest.fixture(scope="module")
def cells():
    notebook = json.loads(make_notebook.NOTEBOOK.read_text(encoding="utf-8"))
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def test_cells_match_the_script(cells):
    found = [(cell["cell_type"], cell["source"]) for cell in cells]
    assert found == [(kind, text.rstrip()) for kind, text in make_notebook.CELLS], (
        "the notebook does not match docs/make_notebook.py; run that script"
    )


def test_outputs_are_stored(cells):
    train, result = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"][1:]
    (shown,) = train
    html = "".join(shown["data"]["text/html"])
    assert "<td>400 of 400</td>" in html
    assert html.count("data:image/svg+xml;base64,") == 2
    assert [output["output_type"] for output in result] == ["stream"]
    for output in train + result:
        assert output["output_type"] != "error"


def test_code_runs_as_printed(cells, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path / "work"))
    namespace = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], "notebook.ipynb", "exec"), namespace)
    (stored,) = cells[-1]["outputs"]
    for text in (capsys.readouterr().out, "".join(stored["text"])):
        assert re.fullmatch(r"10 validations, accuracy 0\.9\d\n", text)
