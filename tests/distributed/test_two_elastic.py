"""Test which samples a run uses, and in which order, if it continues with a different number of processes."""

import contextlib

import pytest
import torch
from torch.utils.data import Dataset
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.preemption import Preempted
from tiny_runs import run

pytestmark = pytest.mark.slow

SAMPLES, EPOCHS = 46, 2
# For each part of a run: the number of processes, the samples per process, and the steps until the part stops.
EQUAL = [(2, 4, 3), (1, 8, 5), (2, 4, None)]
LARGER = [(2, 4, 3), (1, 10, 4), (2, 6, None)]  # 24 samples, then batches of 10 from sample 24, then of 12
UNEVEN = [(2, 4, 1), (1, 3, 3), (2, 4, None)]  # one process stops after 15 samples
PLANS = {"equal": EQUAL, "larger": LARGER, "smaller": UNEVEN}


class Indices(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)]), int(index)


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, x, index, mode):
        return {"loss": self.net(x / SAMPLES).square().mean()}


class Record(Hook):
    priority = "LOWEST"

    def __init__(self, stop):
        self.stop, self.steps = stop, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps.append((runner.epoch, runner.iter, data_batch[1].tolist()))
        if len(self.steps) == self.stop:
            runner.save_checkpoint(runner.work_dir, "part.pth", by_epoch=False, mark_last=True)
            raise Preempted


def part(folder, batch_size, stop, launcher="none"):
    """Train until the run stops. Return this rank's [(epoch, step, indices), ...]."""
    torch.manual_seed(0)
    record = Record(stop)
    with contextlib.suppress(Preempted):
        run(
            folder,
            model=Net(),
            train_dataloader=dict(
                batch_size=batch_size, dataset=Indices(), sampler=dict(type="DefaultSampler")
            ),
            train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
            custom_hooks=[record],
            default_hooks=dict(preemption=None, checkpoint=None),
            launcher=launcher,
            resume=True,
        )
    return record.steps


def train(folder):
    """Run the first or the last part of the run `folder.name` in two processes."""
    if not torch.distributed.is_initialized():
        init_dist("pytorch", backend="gloo")
    last = (folder.parent / "second").exists()
    _, batch_size, stop = PLANS[folder.name][2 if last else 0]
    return get_rank(), part(folder, batch_size, stop, "pytorch")


def equal(folder):
    return train(folder)


def larger(folder):
    return train(folder)


def smaller(folder):
    return train(folder)


def interleaved(ranks):
    """Return {epoch: indices of all ranks, in the order of the sampler}."""
    order = {}
    for steps in zip(*ranks, strict=True):
        epoch = steps[0][0]
        assert all(step[:2] == steps[0][:2] for step in steps)
        lists = [step[2] for step in steps]
        assert len({*map(len, lists)}) == 1
        order.setdefault(epoch, []).extend(index for column in zip(*lists, strict=True) for index in column)
    return order


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """Return {name: {epoch: indices}}, accumulated over the three parts of each run."""
    folder = tmp_path_factory.mktemp("elastic")
    functions = [equal, larger, smaller]
    parts = {name: [] for name in PLANS}
    for number in range(3):
        if number == 1:
            (folder / "second").mkdir()
            for name, plan in PLANS.items():
                parts[name].append([part(folder / name, *plan[1][1:])])
            continue
        for name, answer in run_in_two(functions, folder, timeout=100).items():
            assert not any(isinstance(rank, str) for rank in answer), answer
            parts[name].append([steps for _, steps in sorted(answer)])
    merged = {}
    for name, runs in parts.items():
        merged[name] = {}
        for ranks in runs:
            for epoch, indices in interleaved(ranks).items():
                merged[name].setdefault(epoch, []).extend(indices)
    return merged


def expected(epoch):
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch)).tolist()


@pytest.mark.parametrize("name", ["equal", "larger"])
def test_each_sample_is_used_once_in_the_same_order(orders, name):
    assert orders[name] == {0: expected(0), 1: expected(1)}


def test_sample_is_repeated_if_the_processes_cannot_divide_the_rest_of_a_batch(orders):
    used = orders["smaller"][0]
    assert used[:15] == expected(0)[:15]
    assert used[15:] == expected(0)[14:]  # two processes can only continue after an even number of samples
    assert orders["smaller"][1] == expected(1)
