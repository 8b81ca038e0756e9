"""A small training run with the Runner, in one process or in one of two processes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner


class Labeled(Dataset):
    """A dataset of points in eight dimensions, with labels for three classes."""

    def __init__(self, size=40):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class SteppedNet(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, y, mode):
        scores = self.last(F.relu(self.middle(F.relu(self.norm(self.first(x))))))
        return {"loss": F.cross_entropy(scores, y)} if mode == "loss" else (scores, y)


class LossOfEachStep(Hook):
    """Store the loss of every step, averaged over the ranks."""

    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = outputs["loss"].double().clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)
            loss /= torch.distributed.get_world_size()
        self.losses.append(loss.item())


def train(folder, world, model=None, dataset=None, batch=8, max_epochs=2, prepare=None, **options):
    """Call `prepare(runner)` and train with `batch` samples per step over all processes. Return the Runner."""
    loader = dict(
        dataset=Labeled() if dataset is None else dataset,
        batch_size=batch // world,
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    parts = dict(
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=None),
        launcher="pytorch" if world > 1 else "none",
        randomness=dict(seed=3),
        log_level="ERROR",
    )
    runner = Runner(SteppedNet() if model is None else model, folder, **{**parts, **options})
    if prepare is not None:
        prepare(runner)
    runner.train()
    return runner
