"""Ranks with different numbers of batches finish together, and evaluation counts each sample once."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from two_processes import run_in_two

from slipstream.dist import all_reduce, get_rank
from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.model import BaseModel, MMDistributedDataParallel
from slipstream.runner import Runner


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def forward(self, x, mode):
        return {"loss": self.net(x).square().mean()} if mode == "loss" else x[:, 0]


class Stream(IterableDataset):
    """A stream of samples for 3 batches on rank 0 and 5 batches on rank 1."""

    def __iter__(self):
        yield from ({"x": x} for x in torch.ones(6 + 4 * get_rank(), 3))


class SizedStream(Stream):
    def __len__(self):
        return 6 + 4 * get_rank()


class Samples(Dataset):
    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index))}


class Counted(Hook):
    def __init__(self):
        self.lrs = []

    def after_train_iter(self, runner, **_):
        self.lrs.append(runner.optim_wrapper.param_groups[0]["lr"])


def train(folder, loader, train_cfg, **options):
    counted = Counted()
    runner = Runner(
        Net(),
        folder,
        train_dataloader=loader,
        train_cfg=train_cfg,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=None),
        custom_hooks=[counted],
        launcher="pytorch",
        env_cfg=dict(dist_cfg=dict(timeout=20)),
        log_level="ERROR",
        **options,
    )
    runner.train()
    return runner.iter, counted.lrs, runner.model.module.net.weight.detach().clone()


def by_iterations(folder):
    return train(folder, dict(dataset=Stream(), batch_size=2), dict(by_epoch=False, max_iters=7))


def by_epochs(folder):
    loader = DataLoader(SizedStream(), batch_size=2)
    return train(folder, loader, dict(by_epoch=True, max_epochs=2))


class Sums(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples.tolist()

    def compute_metrics(self, results):
        return {"count": len(results), "sum": sum(results)}


class CollectiveForward(MMDistributedDataParallel):
    """A wrapper whose `val_step` calls a collective, like that of a sharded model."""

    forward_needs_all_ranks = True

    def val_step(self, data):
        met = torch.ones(1)
        all_reduce(met)
        assert met == 2
        return super().val_step(data)


def evaluate(folder, dataset):
    runner = Runner(
        Net(),
        folder,
        val_dataloader=dict(dataset=dataset, batch_size=2),
        val_cfg=dict(),
        val_evaluator=Sums(),
        launcher="pytorch",
        log_level="ERROR",
        cfg=dict(model_wrapper_cfg=dict(type=CollectiveForward)),
    )
    return runner.val()


def evaluate_together(folder):
    return [evaluate(folder, Samples(size)) for size in (1, 2, 9)]


def test_streams_of_different_lengths_end_together_with_equal_weights(tmp_path):
    functions = [by_iterations, by_epochs, evaluate_together]
    answers = run_in_two(functions, tmp_path)
    for name, steps in (("by_iterations", 7), ("by_epochs", 6)):
        for answer in answers[name]:
            assert not isinstance(answer, str), answer
        (first, lrs, weights), (second, other_lrs, other) = answers[name]
        assert (first, second) == (steps, steps), name
        assert lrs == other_lrs
        assert torch.equal(weights, other), name
    one = {"count": 1, "sum": 0.0}
    assert answers["evaluate_together"] == [[one, {"count": 2, "sum": 1.0}, {"count": 9, "sum": 36.0}]] * 2


class Slow(Samples):
    def __getitem__(self, index):
        if get_rank() == 1 and index >= 8:
            time.sleep(8)
        return super().__getitem__(index)


def too_slow(folder):
    runner = Runner(
        Net(),
        folder,
        train_dataloader=dict(dataset=Slow(), batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        launcher="pytorch",
        env_cfg=dict(dist_cfg=dict(timeout=3)),
        log_level="ERROR",
    )
    try:
        runner.train()
    except Exception as error:
        return f"{error} {error.__notes__}"


@pytest.mark.slow
def test_collective_timeout_reports_rank_and_step(tmp_path):
    answer = run_in_two([too_slow], tmp_path)["too_slow"][0]
    assert "imed out" in answer
    assert "on rank 0 of 2, in epoch 1, iteration 3 of training" in answer
