"""Training with losses that are means over a different number of labels per batch, and the same on whole windows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from slipstream.dist import get_rank, get_world_size
from slipstream.model import BaseModel
from slipstream.train_step import accelerate

BATCHES, WINDOW, CLIP = 11, 3, 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batches():
    """Return batches of 6 samples, in which 0 to 4 labels are ignored; in batch 4, all of them are."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES, 6, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (BATCHES, 6), generator=generator)
    for index, labels in enumerate(targets):
        labels[: 6 if index == 4 else index % 5] = -100
    return list(zip(inputs, targets, strict=True))


def mean_loss(scores, targets):
    number = (targets != -100).sum()
    loss = F.cross_entropy(scores, targets, ignore_index=-100, reduction="sum") / number.clamp(min=1)
    return {"loss": loss, "averaged_over": number}


def from_whole_windows(clip=CLIP):
    """Train on each window as one batch, with a plain loop, and return the weights."""
    model, data = net(), batches()
    optimizer = sgd(model)
    for start in range(0, BATCHES, WINDOW):
        inputs, targets = (torch.cat(parts) for parts in zip(*data[start : start + WINDOW], strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets, ignore_index=-100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def make(loss_fn=mean_loss, **options):
    model = net()
    options = dict(accumulate=WINDOW, clip_grad=dict(max_norm=CLIP)) | options
    return model, accelerate(model, sgd(model), loss_fn, options, total_steps=BATCHES)


def train(**options):
    """Train on every batch, of which each process has every n-th sample, and return the weights."""
    model, step = make(**options)
    mine = slice(get_rank(), None, get_world_size())
    for inputs, targets in batches():
        step((inputs[mine], targets[mine]))
    assert getattr(step.inner, "uses_graph", True)
    return model.state_dict()


class Samples(Dataset):
    def __init__(self):
        self.inputs, self.targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs, targets, mode):
        return mean_loss(self.net(inputs), targets)


class OwnStep(Net):
    """A model with its own training step, which may pass the number of labels to the optimizer wrapper."""

    def __init__(self, passes=True):
        super().__init__()
        self.passes = passes

    def train_step(self, data, optim_wrapper):
        losses = self(*data, mode="loss")
        number = {"averaged_over": losses["averaged_over"]} if self.passes else {}
        optim_wrapper.update_params(losses["loss"], **number)
        return {name: value.detach() for name, value in losses.items()}
