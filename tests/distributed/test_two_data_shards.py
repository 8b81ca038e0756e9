"""Tests of training in two processes with an overridden `train_step`, and of sharding a `DataLoader` object."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from two_processes import run_in_two

from slipstream.dataset import build_dataloader
from slipstream.dist import init_dist
from slipstream.model import BaseModel
from slipstream.runner import Runner


class Numbers(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((3,), float(index)), int(index) % 2


class OwnStep(BaseModel):
    """A model whose train_step only calls the default."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)

    def forward(self, x, y, mode):
        return {"loss": F.cross_entropy(self.net(x), y)}

    def train_step(self, data, optim_wrapper):
        return super().train_step(data, optim_wrapper)


def runner(folder, **options):
    return Runner(
        OwnStep(),
        str(folder),
        train_dataloader=dict(
            dataset=Numbers(), batch_size=2, sampler=dict(type="DefaultSampler", shuffle=True)
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        randomness=dict(seed=0),
        launcher="pytorch",
        log_level="ERROR",
        **options,
    )


def own_step(folder):
    made = runner(folder)
    made.train()
    return [p.tolist() for p in made.model.parameters()]


def ready_loader(folder):
    init_dist("pytorch")
    shuffled = build_dataloader(
        DataLoader(Numbers(), batch_size=2, shuffle=True), 0, "train_dataloader", True
    )
    plain = build_dataloader(DataLoader(Numbers(), batch_size=2), 0, "val_dataloader", False)
    return [[int(x[0]) for batch, _ in loader for x in batch] for loader in (shuffled, plain)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([ready_loader, own_step], tmp_path_factory.mktemp("shards"))


def test_ranks_have_equal_weights_with_an_overridden_train_step(answers):
    first, second = answers["own_step"]
    assert isinstance(first, list), first
    assert first == second


def test_data_loader_object_is_sharded_over_the_ranks(answers):
    first, second = answers["ready_loader"]
    assert len(first[0]) == len(second[0]) == 6  # training pads the shards
    assert set(first[0]) | set(second[0]) == set(range(11))
    assert sorted(first[1] + second[1]) == list(range(11))  # evaluation uses each sample once
