"""Test that two processes train on a MosaicML StreamingDataset and resume in the middle of an epoch."""

import contextlib

import pytest
import torch
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.preemption import Preempted
from streams import COUNT, KINDS, augmented, use_package, write_stream
from tiny_runs import run

pytestmark = pytest.mark.slow


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, x, number, mode):
        return {"loss": self.net(x).square().mean()}


class Record(Hook):
    def __init__(self, stop):
        self.stop, self.steps = stop, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps.append((runner.epoch, data_batch[1].tolist(), data_batch[0].flatten().tolist()))
        if len(self.steps) == self.stop:
            runner.save_checkpoint(runner.work_dir, "part.pth", by_epoch=False, mark_last=True)
            raise Preempted


def part(shards, folder, stop=None, resume=False):
    kind = shards.name
    torch.manual_seed(0)
    record = Record(stop)
    with contextlib.suppress(Preempted):
        run(
            folder,
            model=Net(),
            train_dataloader=dict(
                dataset=augmented(use_package(kind))(local=str(shards), shuffle=True, batch_size=4),
                batch_size=4,
                num_workers=1,
                multiprocessing_context="fork",  # the class of the dataset is local, so it cannot be pickled
            ),
            train_cfg=dict(by_epoch=True, max_epochs=2),
            custom_hooks=[record],
            default_hooks=dict(preemption=None, checkpoint=None),
            launcher="pytorch",
            resume=resume,
        )
    return record.steps


def train(folder):
    """Return this rank's steps of an uninterrupted run and of an interrupted and resumed run."""
    init_dist("pytorch", backend="gloo")
    (shards,) = (folder.parent / "shards").iterdir()
    whole = part(shards, folder / "whole")
    resumed = part(shards, folder / "cut", stop=4) + part(shards, folder / "cut", resume=True)
    return get_rank(), whole, resumed


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_used_once_by_either_process(kind, tmp_path, monkeypatch):
    if kind == "package":
        use_package(kind)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # `streaming` reads torchrun's variables
    (tmp_path / "shards").mkdir()
    write_stream(tmp_path / "shards" / kind, kind)
    answers = run_in_two([train], tmp_path, timeout=100)["train"]
    assert not any(isinstance(answer, str) for answer in answers), answers
    (_, whole, resumed), (_, *other) = sorted(answers)
    assert [resumed, other[1]] == [whole, other[0]]
    for epoch in range(2):
        parts = [
            [i for number, batch, _ in steps if number == epoch for i in batch] for steps in (whole, other[0])
        ]
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        assert [i for pair in zip(*parts, strict=True) for i in pair] == order
