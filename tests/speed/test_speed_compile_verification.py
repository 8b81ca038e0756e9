"""Compiled models and blocks are verified: networks with side effects train as in a plain loop, bitwise in float64."""

import collections
import itertools
import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream import accelerate


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Net(nn.Module):
    """Base of the networks; its state is a Python number, a list, a deque and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.count, self.items, self.recent = 0, [], deque(maxlen=3)
        self.register_buffer("t", torch.zeros(()))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class UnusedOutput(Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), self.unused(hidden)


class Counter(Net):
    def forward(self, x):
        self.count += 1
        self.items.append(self.count)
        return super().forward(x) * (1 + 0.1 * self.count)


class Meter:
    def __init__(self):
        self.seen, self.mean, self.history = 0, 0.0, collections.Counter()

    def update(self, value):
        self.seen += 1
        self.mean += (value - self.mean) / self.seen
        self.history[self.seen % 3] += 1


class Objects(Net):
    """Changes a NumPy array, an object, a class attribute and the weights of an unregistered module, and reads them."""

    calls = 0

    def __init__(self):
        super().__init__()
        type(self).calls = 0
        self.histogram, self.meter, self.teacher = np.zeros(3), Meter(), [nn.Linear(4, 8).double()]

    def forward(self, x):
        type(self).calls += 1
        np.add.at(self.histogram, [self.calls % 3], 1)
        self.meter.update(x.abs().mean().item())
        (teacher,) = self.teacher
        with torch.no_grad():
            teacher.weight.lerp_(self.first.weight, 0.1)
        self.items = [self.histogram.tolist(), vars(self.meter).copy(), self.calls, teacher.weight.tolist()]
        scale = 1.0 if self.meter.history[1] > 1 else 0.5
        return super().forward(x) * scale + F.linear(teacher(x), self.unused.weight)


class Iterates(Net):
    def __init__(self):
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0, 4.0])

    def forward(self, x):
        return super().forward(x) * next(self.scales)


class ChangedBuffer(Net):
    def forward(self, x):
        y = super().forward(x) * torch.exp(-self.t)
        self.t += 1
        return y


class ChangedAfterBreak(Net):
    def forward(self, x):
        y = super().forward(x) * torch.exp(-self.t)
        torch._dynamo.graph_break()
        self.t += 1
        return y


class ViewOfBuffer(Net):
    def forward(self, x):
        y, view = super().forward(x) * torch.exp(-self.t), self.t.view(1)
        self.t += 1
        torch._dynamo.graph_break()
        return y + view


class Frozen(Net):
    """Scales by a buffer that compiled code keeps, and computes a value that it does not need after backward."""

    def forward(self, x):
        return self.last(torch.relu(self.first(x) * (self.norm.running_var + 1e-5).rsqrt()))


class Queue(Net):
    """Replaces rows of a buffer that backward reads."""

    def forward(self, x):
        hidden = self.first(x)
        scores = hidden @ self.norm.running_mean.clone()
        with torch.no_grad():
            self.norm.running_mean.copy_(hidden[0])
        return self.last(hidden * scores[:, None])


class CalledTwice(Net):
    def __init__(self):
        super().__init__()
        self.block = ChangedBuffer()

    def forward(self, x):
        return self.block(x) + self.block(0.5 * x)


class Recent(Net):
    def forward(self, x):
        self.recent.append(x.detach().mean())
        return super().forward(x - sum(self.recent) / len(self.recent))


class OwnCheckpoint(Net):
    def body(self, x):
        with torch.no_grad():
            self.t.mul_(0.9).add_(0.1 * x.mean())
        return torch.tanh(self.first(x - self.t))

    def forward(self, x):
        return self.last(checkpoint(self.body, x, use_reentrant=False))


class BrokenGraph(Net):
    def forward(self, x):
        self.count += 1
        hidden = F.dropout(self.norm(self.first(x)), 0.3)
        torch._dynamo.graph_break()
        return self.last(F.dropout(hidden, 0.3)) + random.random() + np.random.rand()


class UnusedDropout(Net):
    def forward(self, x):
        F.dropout(x, 0.5)
        return self.last(F.dropout(torch.tanh(self.first(x)), 0.5))


class Outputs(OrderedDict):
    """A dict without `update`, like the outputs of transformers' models."""

    def update(self, *args, **kwargs):
        raise RuntimeError


class OwnDict(Net):
    def forward(self, x):
        outputs = Outputs()
        outputs["hidden"] = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(outputs["hidden"])


class MaskedRows(Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        hidden = hidden.clone()
        hidden[x[:, 0] > 0] = self.first.bias
        return self.last(hidden)


class InferenceMode(Net):
    def forward(self, x):
        with torch.inference_mode():
            scale = 1 + float(x.mean())
        return super().forward(x) * scale


class InnerGradient(Net):
    def forward(self, x):
        inputs = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(self.first(inputs)).sum(), inputs, create_graph=True)
        return super().forward(x + 0.1 * grad)


class BranchOnValue(Net):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros((), dtype=torch.long)

    def forward(self, x):
        self.seen += 1
        return super().forward(x * (1 + 0.1 * (int(self.seen) % 3)))


def hooks(net, number):
    if number == 3:
        net.handle = net.first.register_forward_hook(lambda module, args, out: out * 2)
    if number == 7:
        net.handle.remove()


def full_backward_hook(net, number):
    if number == 3:
        net.norm.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


def freeze(net, number):
    net.first.weight.requires_grad_(number % 6 < 3)


def mse(outputs, y):
    return F.mse_loss(outputs[0] if isinstance(outputs, tuple) else outputs, y)


def train(make, compile=None, change=lambda net, number: None, by_hand=False, **options):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    net, generator, losses = make().double(), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    speed = {**options, "compile": compile} if compile else options
    step = None if by_hand else accelerate(net, optimizer, mse, speed=speed)
    for number in range(10):
        change(net, number)
        x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (4, 2))
        if step is None:
            loss = mse(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step((x, y))["loss"]
        losses.append(loss.item())
    numbers = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state()
    return {"losses": losses, **net.state_dict()}, (net.count, net.items, list(net.recent), numbers), net


def assert_equal(ours, theirs, tolerance=1e-12):
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)


def is_compiled(net):
    return net._compiled_call_impl is not None and any(net._compiled_call_impl.kind.known)


EAGER = [
    Iterates,
    ChangedBuffer,
    ChangedAfterBreak,
    ViewOfBuffer,
    Queue,
    Recent,
    OwnCheckpoint,
    InnerGradient,
    InferenceMode,
]
GRAPHS = [
    Net,
    Objects,
    UnusedOutput,
    Frozen,
    Counter,
    BrokenGraph,
    UnusedDropout,
    OwnDict,
    MaskedRows,
]


@pytest.mark.parametrize("make", [*EAGER, *GRAPHS, BranchOnValue, Objects], ids=lambda make: make.__name__)
def test_networks_train_as_in_a_plain_loop(make):
    if make is Objects and torch.__version__ < "2.13":
        pytest.skip("torch.compile of 2.11 writes a class attribute as a constant")
    ours = train(make, dict(scope="model", backend="aot_eager"))
    assert_equal(ours, train(make, by_hand=True))
    if make not in (BranchOnValue, Objects):
        assert is_compiled(ours[2]) == (make in GRAPHS)


class ModeCheckpoint(Net):
    """Recomputes a block with BatchNorm, whose statistics eager code then updates twice, but a graph once."""

    def body(self, x):
        return self.norm(self.first(x))

    def hidden(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if torch.is_grad_enabled() else self.body(x)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.last(self.hidden(x))


def test_rejected_graphs_are_not_used_by_a_second_model():
    def evaluate_in_training_mode(net, number):
        with torch.no_grad():
            net(torch.ones(8, 4, dtype=torch.float64))

    runs = [
        train(ModeCheckpoint, compile, evaluate_in_training_mode, by_hand=compile is None)
        for compile in [None, *[dict(scope="model", backend="aot_eager")] * 2]
    ]
    for run in runs[1:]:
        assert_equal(run, runs[0])


@torch.inference_mode()
def evaluate(net, number):
    if number == 4:
        net.eval()(torch.randn(3, 4, dtype=torch.float64))
        net.train()


def test_evaluations_in_inference_mode_are_verified():
    ours = train(Net, dict(scope="step", backend="aot_eager"), evaluate)
    assert_equal(ours, train(Net, change=evaluate, by_hand=True), tolerance=1e-8)  # one gradient is zero


def test_backward_does_not_read_what_a_second_call_has_changed():
    ours = train(CalledTwice, dict(scope="block", blocks=["block"], backend="aot_eager"))
    assert_equal(ours, train(CalledTwice, by_hand=True))
    assert not is_compiled(ours[2].block)


def test_loss_that_changes_outputs_in_place():
    def loss(outputs, y):
        return F.mse_loss(outputs.mul_(2), y)

    def run(compile):
        torch.manual_seed(0)
        net = Net().double()
        step = accelerate(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, dict(compile=compile))
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            step(tuple(torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (4, 2)))
        return net.state_dict(), net

    compiled, net = run(dict(scope="model", backend="aot_eager"))
    torch.testing.assert_close(compiled, run(None)[0], rtol=1e-12, atol=1e-12)
    assert is_compiled(net)


class Blocks(Net):
    """A checkpointed block whose dropout is changed in place, and one with a graph break."""

    class Block(nn.Module):
        def __init__(self, breaks):
            super().__init__()
            self.breaks, self.linear = breaks, nn.Linear(4, 4)

        def forward(self, x):
            if self.breaks:
                torch._dynamo.graph_break()
            return F.dropout(self.linear(x), 0.3).mul_(2)

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(self.Block(False), self.Block(True))

    def forward(self, x):
        return super().forward(self.blocks(x))


def test_checkpointed_block_with_a_graph_break(caplog):
    caplog.set_level("WARNING", "slipstream")
    ours = train(Blocks, dict(scope="model", backend="aot_eager"), activation_checkpointing=["blocks.*"])
    assert_equal(ours, train(Blocks, by_hand=True))
    assert "a block with activation_checkpointing contains a graph break" in caplog.text


@pytest.mark.parametrize("change", [hooks, full_backward_hook, freeze])
def test_changes_during_training_take_effect(change):
    ours = train(Net, dict(scope="model", backend="aot_eager"), change)
    assert_equal(ours, train(Net, change=change, by_hand=True))
    assert is_compiled(ours[2])


def test_failure_in_a_second_graph_changes_nothing():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        if len(graphs) == 2:
            raise RuntimeError("no such instruction")
        return graph.forward

    assert_equal(
        train(BrokenGraph, dict(scope="model", backend=backend)),
        train(BrokenGraph, by_hand=True),
        tolerance=0,
    )


def test_wrong_backend_is_found_and_named(caplog):
    def backend(graph, inputs):
        run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: tuple(out * 1.01 for out in run(*args))

    assert_equal(train(Net, dict(scope="model", backend=backend)), train(Net, by_hand=True), tolerance=0)
    assert "The compiled code of Net differs from the eager module (" in caplog.text
    assert caplog.text.count("differs from the eager module") == 1


CLEAN = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "attention": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.LazyLinear(16),
        nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True),
        nn.Flatten(),
    ),
}


@pytest.mark.parametrize(
    ("name", "precision"), [("convolutions", None), ("convolutions", "fp16"), ("attention", "bf16")]
)
def test_graphs_of_clean_networks_remain_in_use(name, precision):
    torch.manual_seed(0)
    net, graphs = CLEAN[name](), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    net(torch.randn(4, 3, 12, 12))
    speed = dict(precision=precision, compile=dict(scope="model", backend=backend))
    step = accelerate(
        net, torch.optim.SGD(net.parameters(), lr=0.01), lambda out, y: out.square().mean(), speed=speed
    )
    for number in range(12):
        step((torch.randn(3 if number % 4 == 3 else 4, 3, 12, 12), torch.zeros(4)))
        with torch.no_grad():
            net.eval()(torch.randn(4, 3, 12, 12))
            net.train()
    kind = net._compiled_call_impl.kind
    assert len(graphs) == len(kind.known) == 3  # training, a smaller batch, validation
    assert all(graph.verified for sequence in kind.known for graph in sequence)
