"""Write docs/notebook.ipynb: execute its cells in a Jupyter kernel, and store their outputs.

pip install nbclient nbformat ipykernel
python docs/make_notebook.py
"""

from __future__ import annotations

from pathlib import Path

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")
TITLE = """\
# Training in a notebook

In a notebook, a run shows a table of its latest values and the curves of its loss and metrics. Both are updated while
the cell runs. No option is required.
"""
DATA = """\
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.evaluator import BaseMetric
from slipstream.model import BaseModel
from slipstream.runner import Runner


def points(count, seed):
    \"\"\"Return points in the plane, and whether each is inside a ring.\"\"\"
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    radius = inputs.norm(dim=1)
    return TensorDataset(inputs, ((radius > 0.7) & (radius < 1.5)).long())


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, inputs, targets, mode):
        scores = self.layers(inputs)
        return {"loss": F.cross_entropy(scores, targets)} if mode == "loss" else (scores, targets)


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        scores, targets = data_samples
        self.results += (scores.argmax(1) == targets).tolist()

    def compute_metrics(self, results):
        return {"accuracy": sum(results) / len(results)}
"""
TRAIN = """\
runner = Runner(
    model={"type": Net},  # built after the seed is set
    work_dir=tempfile.mkdtemp(),
    train_dataloader=DataLoader(points(2000, seed=0), batch_size=50, shuffle=True),
    val_dataloader=DataLoader(points(500, seed=1), batch_size=100),
    val_cfg={},
    val_evaluator={"type": Accuracy},
    train_cfg={"by_epoch": True, "max_epochs": 10},
    optim_wrapper={"optimizer": {"type": "Adam", "lr": 0.01}},
    randomness={"seed": 0},
    log_level="ERROR",  # the table replaces the log lines
)
runner.train();
"""
RESULT_TEXT = """\
The run has also written its log and its [report](report.md) to `runner.log_dir`. The values of the report are available
in Python.
"""
RESULT = """\
from pathlib import Path

from slipstream.report import read_run

accuracy = read_run(Path(runner.log_dir)).curves["val/accuracy"]
print(f"{len(accuracy.x)} validations, accuracy {accuracy.newest:.2f}")
"""
CELLS = [("markdown", TITLE), ("code", DATA), ("code", TRAIN), ("markdown", RESULT_TEXT), ("code", RESULT)]


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = []
    for index, (kind, text) in enumerate(CELLS):
        new_cell = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cells.append(new_cell(text.rstrip(), id=f"cell-{index}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    NotebookClient(notebook, timeout=300, record_timing=False).execute()
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.validate(notebook)
    NOTEBOOK.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
