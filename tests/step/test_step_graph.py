"""`GraphStep` matches a plain loop and detects invalid graphs."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from graphs import STEPS, Counting, batches, by_hand, graph_step, in_graph, net, train
from torch.optim import SGD

from slipstream.model import AveragePart, BaseAveragedModel
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.step import EagerStep, sum_losses
from slipstream.step.graph import Phase
from slipstream.step.parts import StepPart
from slipstream.step.verification import WrongNumbersError

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def assert_same(one, other, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=rtol, atol=atol)


def falling(optimizer, number):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + number)


# ---- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.2])
def test_graph_step_matches_a_plain_training_loop(clip):
    model, _, losses = by_hand(MOMENTUM, batches(), clip=clip)
    own, _, found = in_graph(MOMENTUM, batches(), clip_grad=clip and dict(max_norm=clip))
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert_same(own, model)


def test_accumulated_gradients_match_a_plain_loop():
    model, _, losses = by_hand(MOMENTUM, batches(), window=3)
    own, optim, found = in_graph(MOMENTUM, batches(), accumulative_counts=3)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert_same(own, model)
    assert all(p.grad is None for p in optim.parameters())


@pytest.mark.parametrize("make", [graph_step, None], ids=["graph", "eager"])
@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (2, 3)])
def test_number_of_accumulated_batches_can_change(counts, make):
    def change(number):
        if number == 5:
            optim._accumulative_counts = counts[1]

    own, model = net(), net()
    optim, by_hand_optim = OptimWrapper(MOMENTUM(own.parameters()), counts[0]), MOMENTUM(model.parameters())
    eager = EagerStep(
        lambda batch: sum_losses({"loss": F.cross_entropy(own(batch[0]), batch[1])}), own, optim
    )
    found = train(eager if make is None else make(own, optim), batches(), change)
    window, losses = [], []
    for number, (x, y) in enumerate(batches()):
        window.append(F.cross_entropy(model(x), y))
        losses.append(window[-1].detach())
        if (number + 1) % counts[number >= 5] == 0:
            (sum(window) / len(window)).backward()
            by_hand_optim.step()
            by_hand_optim.zero_grad()
            window = []
    torch.testing.assert_close(found, torch.stack(losses), rtol=1e-5, atol=0)
    assert_same(own, model)


def test_scheduler_changes_settings_without_a_new_graph():
    compiler = Counting()
    model, _, losses = by_hand(MOMENTUM, batches(), falling)
    own, _, found = in_graph(MOMENTUM, batches(), falling, backend=compiler)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert_same(own, model)
    assert compiler.graphs == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_graph_in_lower_precision_matches_the_eager_step(dtype):
    def run(graph):
        model = net()
        scale = dict(init_scale=2.0**19, growth_interval=3)
        optim = AmpOptimWrapper(
            optimizer=MOMENTUM(model.parameters()),
            dtype=dtype,
            loss_scale=scale,
            clip_grad=dict(max_norm=0.5),
        )
        eager = EagerStep(lambda b: sum_losses({"loss": F.cross_entropy(model(b[0]), b[1])}), model, optim)
        losses = train(graph_step(model, optim) if graph else eager, batches(10))
        return losses, model, optim.loss_scaler and optim.loss_scaler.state_dict()

    (losses, model, scaler), (expected, other, reference) = run(True), run(False)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert_same(model, other, rtol=1e-2, atol=1e-3)
    assert scaler == reference
    if dtype == "float16":
        assert scaler["scale"] < 2.0**19  # some steps overflowed and were skipped


def test_dropout_draws_the_same_random_numbers_as_eager():
    one, other = net(0.3), net(0.3)
    torch.manual_seed(1)
    _, _, losses = by_hand(MOMENTUM, batches(), model=one)
    torch.manual_seed(1)
    _, _, found = in_graph(MOMENTUM, batches(), model=other)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert_same(other, one)


class Scripted(BaseAveragedModel):
    """An average with a fixed sequence of EMA weights."""

    def __init__(self, model, weights):
        super().__init__(model)
        self.weights = iter(weights)

    def weight(self, step):
        return next(self.weights)


# ---- state ------------------------------------------------------------------------------------------------


def test_loaded_state_is_used():
    data = batches()
    whole, _, _ = in_graph(MOMENTUM, data)
    model, optim, _ = in_graph(MOMENTUM, data[:5])
    other = net()
    other.load_state_dict(model.state_dict())
    resumed = OptimWrapper(optimizer=MOMENTUM(other.parameters()))
    step = graph_step(other, resumed)
    step(batches(1, seed=9)[0])  # change the state before loading
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optim.state_dict()))
    train(step, data[5:])
    assert_same(other, whole, rtol=0, atol=0)


class OwnSGD(SGD):
    """A custom optimizer that is not part of torch."""

    __module__ = "somewhere.else"

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad.sign(), alpha=-group["lr"])


def test_custom_optimizer_steps_outside_the_graph():
    make = partial(OwnSGD, lr=0.01)
    model, _, losses = by_hand(make, batches())
    own, _, found = in_graph(make, batches())
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    assert_same(own, model)


# ---- fallbacks --------------------------------------------------------------------------------------------


def drops_gradient(graph, inputs):
    """A compiler with a bug from torch 2.13: one gradient is zero."""
    graph = copy.deepcopy(graph)
    (grad,) = (node for node in graph.graph.nodes if node.target is torch.autograd.grad)
    first = next(iter(grad.users))
    with graph.graph.inserting_after(first):
        zero = graph.graph.call_function(torch.zeros_like, (first,))
    first.replace_all_uses_with(zero, delete_user_cb=lambda user: user is not zero)
    graph.recompile()
    return graph.forward


def test_lost_gradient_is_detected_before_the_graph_is_used():
    model, other, told = net(), net(), []
    optim = OptimWrapper(optimizer=MOMENTUM(model.parameters()))
    average = Scripted(model, [0.5] * (STEPS - 1))  # the first update copies the weights
    optim.parts.append(AveragePart(average, model, lambda: optim.batches))

    def recover(error):
        told.append(error)
        return EagerStep(lambda b: sum_losses({"loss": F.cross_entropy(model(b[0]), b[1])}), model, optim)

    found = train(graph_step(model, optim, drops_gradient, recover), batches())
    _, _, losses = by_hand(MOMENTUM, batches(), model=other)
    torch.testing.assert_close(found, losses, rtol=0, atol=0)
    assert_same(model, other, rtol=0, atol=0)
    assert isinstance(told[0], WrongNumbersError)
    assert told[0].compiler
    assert "'0.weight'" in str(told[0])
    assert next(average.weights, "none left") == "none left"


class _FailsOnce(StepPart):
    on_host = True

    def __init__(self):
        self.batches = 0

    def after_batch(self):
        self.batches += 1
        if self.batches == 8:
            raise ZeroDivisionError


def test_error_after_the_graph_is_raised_and_the_batch_is_counted_once():
    make, data = partial(SGD, lr=0.05), batches()
    model = net()
    optim = OptimWrapper(optimizer=make(model.parameters()))
    optim.parts.append(_FailsOnce())
    step = graph_step(model, optim)
    for number, batch in enumerate(data):
        if number == 7:
            with pytest.raises(ZeroDivisionError):
                step(batch)
        else:
            step(batch)
    torch.testing.assert_close(model.state_dict(), by_hand(make, data)[0].state_dict())
    assert optim.batches == len(data)


@pytest.mark.parametrize(
    ("max_norm", "changed"), [(100.0, "clipping is dropped"), (0.001, "the bound is dropped")]
)
def test_clipping_is_verified_active_and_inactive(max_norm, changed):
    def backend(graph, inputs):
        graph = copy.deepcopy(graph)
        for node in graph.graph.nodes:
            if node.target == "clamp":  # the factor by which gradients are multiplied, at most 1
                with graph.graph.inserting_after(node):
                    factor = node.args[0]
                    wrong = graph.graph.call_function(torch.ones_like, (factor,))
                node.replace_all_uses_with(wrong if changed == "clipping is dropped" else factor)
        graph.recompile()
        return graph.forward

    errors = []
    model = net()
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad={"max_norm": max_norm})
    step = graph_step(model, optim, backend, errors.append)
    train(step, batches(4))
    assert isinstance(errors[0], WrongNumbersError)
    assert step.phase is Phase.EAGER
