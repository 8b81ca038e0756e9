"""docs/trainer.md: its script runs, and its table equals that of the code."""

import re
from pathlib import Path

from slipstream.training.params import Refused, TrainingParams

PAGE = Path(__file__).parents[2] / "docs/trainer.md"


def test_script_runs_and_writes_the_listed_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(script, str(PAGE), "exec"), {})
    validated, tested = map(float, capsys.readouterr().out.splitlines()[-1].split())
    assert validated > 0.8, "the model must learn: random guessing gives 0.33"
    assert abs(tested - validated) < 1e-6
    files = {path.name for path in (tmp_path / "checkpoints/my_experiment").iterdir()}
    assert {"ckpt_latest.pth", "ckpt_best.pth", "average_model.pth", "lr_schedule.png"} <= files


def test_table_of_keys_equals_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8").split("|---|---|\n")[-1] == table()


def table():
    """Return the rows of the page. Run print(table()) to render them again."""
    rows = []
    for key, meaning in TrainingParams.table().items():
        text = f"only its default: {meaning.why}" if isinstance(meaning, Refused) else meaning
        rows.append(f"| `{key}` | {text} |\n")
    return "".join(rows)
