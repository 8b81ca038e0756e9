"""Networks and backends for compilation tests."""

import torch
from torch import nn

from slipstream.model import BaseModel
from slipstream.optim import AmpOptimWrapper, OptimWrapper


class Net(BaseModel):
    def __init__(self, broken_graph=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.last = nn.Linear(8, 2)
        self.broken_graph = broken_graph
        self.breaks = 0

    def forward(self, x, y, mode="tensor"):
        hidden = self.first(x)
        if self.broken_graph:
            torch._dynamo.graph_break()
        out = self.last(hidden)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(out, y)}
        return {"preds": out, "targets": y} if mode == "predict" else out


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x = torch.randn(8, 3, generator=generator)
        made.append((x, x[:, :2].argmax(1)))
    return made


def run(model, data, amp=False):
    """Train, and validate after every second batch. Return the losses and the scores."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim = AmpOptimWrapper(optimizer=optimizer) if amp else OptimWrapper(optimizer)
    losses, scores = [], []
    for number, batch in enumerate(data):
        losses.append(model.train_step(batch, optim)["loss"])
        if number % 2:
            model.eval()
            scores.append(model.val_step(batch)["preds"])
            model.train()
    return losses, scores


def assert_as_eager(model, eager, amp=False, tolerance=1e-6):
    data = batches()
    for ours, theirs in zip(run(model, data, amp), run(eager, data, amp), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert model.state_dict().keys() == eager.state_dict().keys()
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=tolerance, atol=tolerance)


class Backend:
    """A callable backend that runs graphs uncompiled, counts graphs and calls, and fails for graph `fail_at`."""

    def __init__(self, fail_at=None):
        self.graphs, self.fail_at, self.calls = 0, fail_at, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        if self.graphs == self.fail_at:
            raise RuntimeError("no such instruction")

        def call(*args):
            self.calls += 1
            return graph(*args)

        return call


def raises(graph, inputs):
    raise RuntimeError("no such instruction")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return x + self.body(x)


class Tower(nn.Module):
    def __init__(self, widths):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(widths[0], widths[0])
        self.blocks = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            width = block.body[0].in_features
            x = block(x[:, :1].expand(-1, width) if width != x.shape[1] else x)
        return x
