"""Train with a checkpoint after every step, and write the sample indices of each rank and step to `steps.jsonl`.

torchrun starts this script: `elastic_training.py FOLDER SECONDS_PER_STEP`.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from slipstream.dist import get_rank, get_world_size
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner

SAMPLES, EPOCHS, BATCH_SIZE, SEED = 48, 2, 4, 3


class Indices(Dataset):
    """A dataset whose samples are their own indices."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)]), int(index)


class Net(BaseModel):
    """A linear model."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, x, index, mode):
        return {"loss": self.net(x / SAMPLES).square().mean()}


class Record(Hook):
    """Appends a line to `steps.jsonl` at the start of training and after each step."""

    priority = "HIGHEST"  # before the checkpoint of the step

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds

    def before_train(self, runner):
        self.write(start=runner.iter, inner=runner.inner_iter, epoch=runner.epoch)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.write(step=runner.iter + 1, epoch=runner.epoch, indices=data_batch[1].tolist())
        time.sleep(self.seconds)

    def write(self, **values):
        values |= dict(world=get_world_size(), rank=get_rank())
        descriptor = os.open(self.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, (json.dumps(values) + "\n").encode())  # a single call keeps lines intact
        os.close(descriptor)


def main():
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(0)
    Runner(
        model=Net(),
        work_dir=str(folder / "run"),
        train_dataloader=dict(
            batch_size=BATCH_SIZE, dataset=Indices(), sampler=dict(type="DefaultSampler"), num_workers=0
        ),
        train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[Record(folder, seconds)],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        visualizer=dict(type="Visualizer", vis_backends=[]),
        randomness=dict(seed=SEED),
        launcher="pytorch",
        resume=True,
    ).train()


if __name__ == "__main__":
    main()
