"""Test that the step graph matches the eager step on an accelerator, with each option and without host-device syncs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from accelerators import BACKEND, DEVICE, IS_CUDA, cuda_only, no_waiting
from slipstream.step.graph import GraphStep
from slipstream.train_step import accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)
EMA = dict(type="threshold", decay=0.9)
CASES = {
    "plain": {},
    "average and clipping": dict(ema=EMA, clip_grad=dict(max_norm=0.5)),
    "accumulation": dict(ema=EMA, accumulate=2),
    "channels_last": dict(channels_last=True),
    "bf16": dict(precision="bf16", ema=EMA),
    "fp16": dict(precision="fp16", clip_grad=dict(max_norm=0.5)),
    "sync_bn in one process": dict(sync_bn=True),
    "SAM": dict(sam=True),
    "CUDA graph": dict(cuda_graph=True, ema=EMA, clip_grad=dict(max_norm=0.5)),
    "CUDA graph, fp16": dict(cuda_graph=True, precision="fp16"),
    "CUDA graph, accumulation": dict(cuda_graph=True, accumulate=2),
    "CUDA graph, SAM": dict(cuda_graph=True, sam=True),
}
ROUGH = ("bf16", "fp16", "CUDA graph, fp16")
STEP = dict(scope="step", backend=BACKEND)
only_replayed = pytest.param(True, marks=cuda_only)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    torch._dynamo.reset()
    if IS_CUDA:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def net(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), norm(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
    )


def batches(count=12, size=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, 3, 8, 8, generator=generator).to(DEVICE)
    y = torch.randint(0, 4, (count, size), generator=generator).to(DEVICE)
    return list(zip(x, y, strict=True))


def train(compile, make=MOMENTUM, data=None, norm=nn.BatchNorm2d, **options):
    model = net(norm).to(DEVICE)
    step = accelerate(model, make(model.parameters()), F.cross_entropy, dict(options, compile=compile))
    losses = torch.stack([step(batch)["loss"] for batch in data or batches()])
    return losses, model, step


def assert_agree(mine, theirs, rtol=1e-3, atol=1e-4):
    torch.testing.assert_close(mine[0], theirs[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(mine[1].state_dict(), theirs[1].state_dict(), rtol=rtol, atol=atol)
    if mine[2].average is not None:
        torch.testing.assert_close(
            mine[2].average.state_dict(), theirs[2].average.state_dict(), rtol=rtol, atol=atol
        )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[cuda_only] if case.startswith("CUDA graph") else []) for case in CASES],
)
def test_step_graph_trains_like_the_eager_step(case):
    options = dict(CASES[case])
    replays = options.pop("cuda_graph", False)
    eager = train(None, **options)
    graph = train(STEP, **options, **(dict(cuda_graph=True) if replays else {}))
    step = graph[2].inner
    assert type(step) is GraphStep
    assert step.uses_graph
    assert (step._captured.cuda_graphs is not None) == replays
    assert_agree(graph, eager, *((0.05, 0.02) if case in ROUGH else ()))


def _groups(channels):
    return nn.GroupNorm(4, channels)


@cuda_only
def test_reduce_overhead_uses_a_cuda_graph_for_the_whole_step():
    graph = train(dict(scope="step", mode="reduce-overhead"))
    assert graph[2].inner._captured.cuda_graphs is not None
    assert_agree(graph, train(None))


@pytest.mark.parametrize("cuda_graph", [False, only_replayed])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_steps_do_not_synchronize_with_the_device(cuda_graph, precision):
    options = dict(cuda_graph=cuda_graph, precision=precision, ema=EMA, clip_grad=dict(max_norm=0.5))
    data = batches(16)
    _, model, step = train(STEP, data=data[:8], **options)
    assert step.inner.uses_graph
    with no_waiting():
        for number, batch in enumerate(data[8:]):
            step.optim.param_groups[0]["lr"] = 0.05 / (1 + number)  # simulate an LR schedule
            step(batch)
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("cuda_graph", [False, only_replayed])
def test_dropout_and_scheduled_learning_rates_match_eager_training(cuda_graph):
    def train_with_schedule(compile, **options):
        model = nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(4, 4)).to(DEVICE)
        step = accelerate(
            model, MOMENTUM(model.parameters()), F.cross_entropy, dict(options, compile=compile)
        )
        torch.manual_seed(1)
        losses = []
        for number, batch in enumerate(batches()):
            step.optim.param_groups[0]["lr"] = 0.05 / (1 + number)
            losses.append(step(batch)["loss"])
        return torch.stack(losses), model, step

    graph = train_with_schedule(STEP, cuda_graph=cuda_graph)
    assert graph[2].inner.uses_graph
    assert_agree(graph, train_with_schedule(None))


def test_failed_verification_leaves_a_working_optimizer():
    """AdamW's step counts move to the device for the graph.

    After a failed verification, they and the `capturable` flag are restored.
    """
    model = net(_groups).to(DEVICE)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def wrong(graph, inputs):
        def run(*args):
            outputs = graph.forward(*args)
            with torch.no_grad():
                for weight in args:
                    if isinstance(weight, torch.Tensor) and weight.shape == (4, 576):
                        weight.zero_()
            return outputs

        return run

    how = dict(scope="step", backend=wrong)
    step = accelerate(model, optimizer, F.cross_entropy, dict(compile=how, accumulate=2))
    for batch in batches(4):
        step(batch)
    assert not step.inner.uses_graph
    assert torch.isfinite(model[0].weight).all()
