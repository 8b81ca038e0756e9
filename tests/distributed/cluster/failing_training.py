"""Train until rank 1 fails in its third step: python failing_training.py LAUNCHER raise|kill busy|away.

The other ranks wait for the gradients of rank 1 (busy) or sleep outside a collective for minutes (away).
"""

import os
import signal
import sys
import time

import torch
from torch import nn

from slipstream.dist import get_rank
from slipstream.model import BaseModel
from slipstream.runner import Runner


class FailsInStep3(BaseModel):
    def __init__(self, how, others):
        super().__init__()
        self.how, self.others = how, others
        self.steps = 0
        self.net = nn.Linear(4, 1)

    def forward(self, x, mode):
        self.steps += 1
        if self.steps == 3 and get_rank() == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the third step is too high")
        if self.steps == 3 and self.others == "away":
            time.sleep(600)
        return {"loss": self.net(x).square().mean()}


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 80)}


if __name__ == "__main__":
    launcher, how, others = sys.argv[1:]
    Runner(
        model=FailsInStep3(how, others),
        work_dir="faulty",
        train_dataloader=dict(
            batch_size=2, dataset=Points(), sampler=dict(type="DefaultSampler", shuffle=True)
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        launcher=launcher,
    ).train()
    print("trained to the end")
