"""Hooks that change a user's objects take effect in one and two processes, and evaluation counts each sample once."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
from two_processes import run_in_two

from slipstream import Runner
from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook

LOADERS = [
    (kind, workers, persistent)
    for kind in ("loader", "subclass", "dict")
    for workers, persistent in ((0, False), (1, False), (1, True))
    if (kind, workers) != ("loader", 1) and (kind, persistent) != ("dict", True)  # as for a subclass
]


def environment(name, default):
    return int(os.environ.get(name, default))


class Data(Dataset):
    """Samples that depend on attributes which hooks change."""

    offset, epoch = 0.0, 0

    def __init__(self):
        self.inputs = torch.linspace(-1, 1, 32).view(16, 2)

    def __len__(self):
        return 16

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.inputs[index] + self.offset + 0.1 * self.epoch, self.inputs[index].sum()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x if self.training else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.doubled, self.scale = nn.Linear(2, 1), Doubled(), 1.0
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.3, -0.2]]))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.scale * self.doubled(self.linear(x))[:, 0]


class Halved(DataLoader):
    """A loader that changes its batches."""

    factor = 1.0

    def __iter__(self):
        return ((self.factor * x, y) for x, y in super().__iter__())


class Change(Hook):
    """Change the data set, the model, the modes, the batch size and the loader, as a Lightning callback does."""

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.train_dataloader.dataset.offset = 1.0
            runner.train_dataloader.batch_sampler.batch_size *= 2
            runner.train_dataloader.factor = 0.5
            runner.model.scale = 0.5
            runner.model.doubled.eval()


def plain_loop(kind):
    net, data = Net(), Data()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        data.set_epoch(epoch)
        if epoch == 1:
            data.offset, net.scale = 1.0, 0.5
            net.doubled.eval()
        for x, y in DataLoader(data, 8 if epoch else 4):
            optimizer.zero_grad()
            F.mse_loss(net(0.5 * x if epoch and kind == "subclass" else x), y).backward()
            optimizer.step()
    return net.linear.weight.tolist(), net.linear.bias.tolist()


def trained(folder, kind, workers, persistent):
    net, data = Net(), Data()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = ExponentialLR(optimizer, 1.0)
    options = dict(
        batch_size=4 // environment("WORLD_SIZE", 1), num_workers=workers, persistent_workers=persistent
    )
    loader = dict(dataset=data, shuffle=False, **options)
    if kind != "dict":
        loader = (Halved if kind == "subclass" else DataLoader)(data, **options)
    runner = Runner(
        net,
        folder / f"{kind}{workers}{persistent}",
        loader,
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=optimizer,
        param_scheduler=schedule,
        loss_fn=F.mse_loss,
        custom_hooks=[Change()],
        launcher="pytorch" if environment("WORLD_SIZE", 1) > 1 else "none",
        log_level="ERROR",
        default_hooks=dict(checkpoint=None, report=None),
    )
    runner.train()
    run_loader, own = runner.train_dataloader, runner.param_schedulers[0]
    own.gamma = 0.5
    seen = run_loader.dataset is data, runner.optim_wrapper.optimizer is optimizer, schedule.gamma == 0.5
    if kind != "dict":
        seen += isinstance(run_loader, type(loader)), run_loader.batch_sampler is loader.batch_sampler
        seen += run_loader.sampler is loader.sampler, run_loader.batch_size == loader.batch_size
    steps = runner.iter, runner.max_iters
    return all(seen), steps, (net.linear.weight.tolist(), net.linear.bias.tolist())


def changes(folder):
    return {case: trained(folder, *case) for case in LOADERS}


class Chunks(Sampler):
    """A sampler that gives each rank a contiguous chunk, padded with the first samples of the chunk."""

    def __init__(self, size):
        self.num_replicas, self.size = environment("WORLD_SIZE", 1), -(-size // environment("WORLD_SIZE", 1))
        first = environment("RANK", 0) * self.size
        chunk = list(range(first, min(first + self.size, size)))
        self.indices = (chunk * self.size)[: self.size]

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(self.indices)


class Sum(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(float(data_batch[1].sum()))

    def compute_metrics(self, results):
        return {"sum": sum(results)}


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.param = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.tensor([0.0, 1.0]).expand(len(x), 2) + self.param


def evaluations(folder):
    y = torch.tensor([0] + [1] * 12)
    data = TensorDataset(y[:, None].float(), y)
    loaders = {"plain": DataLoader(data, 4)}
    loaders["round_up"] = dict(dataset=data, batch_size=4, sampler=dict(type="DefaultSampler", round_up=True))
    if environment("WORLD_SIZE", 1) > 1:
        loaders["distributed"] = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
        loaders["chunks"] = DataLoader(data, batch_sampler=BatchSampler(Chunks(13), 2, False))
    return {
        (name, kind): Runner(
            Ones(),
            folder / name / kind,
            val_dataloader=loader,
            val_cfg={},
            val_evaluator=evaluator,
            loss_fn=F.cross_entropy,
            launcher="pytorch" if environment("WORLD_SIZE", 1) > 1 else "none",
            log_level="ERROR",
        ).val()
        for name, loader in loaders.items()
        for kind, evaluator in (("metrics", [dict(type="Accuracy"), Sum()]), ("loss", "loss"))
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([changes, evaluations], tmp_path_factory.mktemp("two"), timeout=200)


@pytest.mark.parametrize("world", [1, 2])
def test_changes_of_a_callback_take_effect(world, answers, tmp_path):
    results = answers["changes"] if world == 2 else [changes(tmp_path)]
    for result in results:
        assert not isinstance(result, str), result
        for case, (own_objects, steps, weights) in result.items():
            assert own_objects, case
            assert steps == (8, 8), case
            for got, right in zip(weights, plain_loop(case[0]), strict=True):
                assert torch.allclose(torch.tensor(got), torch.tensor(right), atol=1e-6), (case, got, right)


def test_each_sample_is_counted_once_whatever_the_sampler(answers, tmp_path):
    right = {"accuracy/top1": 100 * 12 / 13, "sum": 12.0}
    loss = F.cross_entropy(torch.tensor([[0.0, 1.0]]).expand(13, 2), torch.tensor([0] + [1] * 12)).item()
    for result in [*answers["evaluations"], evaluations(tmp_path)]:
        assert not isinstance(result, str), result
        for (name, kind), values in result.items():
            assert values == pytest.approx({"loss": loss} if kind == "loss" else right), (name, kind)
