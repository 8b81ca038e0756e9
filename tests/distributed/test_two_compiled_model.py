"""Two ranks verify the graphs of a compiled model together, and calls that need another graph later run eagerly."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from two_processes import run_in_two

from slipstream import accelerate
from slipstream.dist import init_dist


class Net(nn.Module):
    """A network that may subtract the mean of its last outputs, whose graphs depend on the number of outputs."""

    def __init__(self, length):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.last = nn.Linear(8, 2), deque(maxlen=length) if length else None

    def forward(self, x):
        x = self.body(x)
        if self.last is not None:
            self.last.append(x.detach().mean())
            x = x - sum(self.last) / len(self.last)
        return self.head(x)


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, graph, inputs):
        run = aot_eager(graph, inputs)

        def counted(*args):
            self.calls += 1
            return run(*args)

        return counted


def train(length, sizes, backend=None, scope="model"):
    """Return the weights as a list."""
    torch._dynamo.reset()
    model = Net(length).double()
    speed = {} if backend is None else dict(compile=dict(scope=scope, backend=backend, cache=False))
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), F.mse_loss, speed)
    generator = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    torch.manual_seed(9)
    for size in sizes:
        x, y = (torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (4, 2))
        step((x, y))
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def programs(folder):
    if not torch.distributed.is_initialized():
        init_dist("pytorch", backend="gloo")
    found = []
    for length, sizes in ((0, [8] * 14), (0, [8, 8, 6] * 5), (3, [8] * 14)):
        backend = Counting()
        found.append((train(length, sizes, backend), train(length, sizes), backend.calls))
    return found


def steps(folder):
    """Train with the step as one graph; the deque has two, and then three elements after the first graphs."""
    return train(3, [8] * 6, aot_eager, "step"), train(3, [8] * 6)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([programs, steps], tmp_path_factory.mktemp("compiled"))


def test_steps_that_change_python_objects_train_as_without_compilation(answers):
    for compiled, plain in answers["steps"]:
        assert compiled == pytest.approx(plain, rel=1e-12)


def test_compiled_models_train_as_without_compilation(answers):
    for answer in answers["programs"]:
        assert not isinstance(answer, str), answer
        for compiled, plain, _ in answer:
            assert compiled == plain
    for calls in zip(*([calls for *_, calls in answer][:2] for answer in answers["programs"]), strict=True):
        assert min(calls) > 5  # the ranks use the graphs
