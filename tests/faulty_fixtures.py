"""Dataset, model and hook for runs that fail on purpose."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from slipstream.errors import DataError
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.registry import DATASETS, HOOKS, MODELS

FOLDER = str(Path(__file__).parent)
"""Folder to add to the processes' PYTHONPATH."""

CONFIG = """\
custom_imports: {imports: [faulty_fixtures]}
model: {type: Line}
train_dataloader: {batch_size: 2, dataset: {type: Points}, sampler: {type: DefaultSampler, shuffle: true}}
train_cfg: {by_epoch: true, max_epochs: 3}
optim_wrapper: {optimizer: {type: SGD, lr: 0.1, momentum: 0.9}}
randomness: {seed: 0}
"""


@DATASETS.register_module()
class Points(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.randn(3, generator=torch.Generator().manual_seed(int(index)))
        return x, x.sum(0, keepdim=True)


@MODELS.register_module()
class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x, y, mode):
        return {"loss": (self.line(x) - y).square().mean()}


@HOOKS.register_module()
class FailOnRank1(Hook):
    """A hook that calls its method `how` on rank 1 at the start of `epoch`, except in a restarted job.

    If `epoch` is -1, the hook calls the method at the start of training, even in a restarted job.
    """

    def __init__(self, how, epoch=1):
        self.how, self.epoch = how, epoch

    def before_train(self, runner):
        if self.epoch == -1 and runner.rank == 1:
            getattr(self, self.how)()

    def before_train_epoch(self, runner):
        restarted = any(int(os.environ.get(f"{n}_RESTART_COUNT", 0)) for n in ("TORCHELASTIC", "SLURM"))
        if runner.epoch == self.epoch and runner.rank == 1 and not restarted:
            self._wait_for_last_checkpoint(runner)
            getattr(self, self.how)()

    def _wait_for_last_checkpoint(self, runner):
        """Wait until rank 0 has written the previous epoch's checkpoint in the background."""
        last = Path(runner.work_dir) / "last_checkpoint"
        while runner.epoch and not (last.exists() and last.read_text().endswith(f"epoch_{runner.epoch}.pth")):
            time.sleep(0.01)

    def error(self):
        raise DataError("sample 3 is broken")

    def bug(self):
        raise RuntimeError("the disk is on fire")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        os._exit(7)

    def wait(self):
        print("waiting", flush=True)
        time.sleep(10)
