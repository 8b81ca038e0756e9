"""Tests of DDP options in two processes: the number, dtype and size of messages, and the results."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import run_in_two
from two_trainings import LossOfEachStep, SteppedNet, train

from slipstream.dist import get_rank
from slipstream.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

ACCUMULATED = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=4)
BF16 = dict(ACCUMULATED, type="AmpOptimWrapper", dtype="bfloat16")


class Parts(BaseModel):
    """A model that trains its two children itself, so each child is wrapped separately."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, x, y, mode):
        return {"loss": F.cross_entropy(self.head(self.body(x)), y)}

    def train_step(self, data, optim_wrapper):
        wrapper = self.wrapper() if hasattr(self, "wrapper") else self
        with optim_wrapper.optim_context(wrapper):
            loss = self(*data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Counter:
    """Count the gradient syncs of every wrapped module, with a communication hook that averages gradients like DDP."""

    def __init__(self):
        self.syncs = {}

    def __call__(self, runner):
        model = runner.model
        if isinstance(model, MMSeparateDistributedDataParallel):
            model.module.wrapper = lambda: (
                model
            )  # train_step uses the wrapper to disable the sync of all children
        for name, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                module.register_comm_hook(name, self.count)

    def count(self, name, bucket):
        self.syncs[name] = self.syncs.get(name, 0) + bucket.is_last()
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def state(runner):
    model = runner.model
    model = model.module if hasattr(model, "module") else model
    return {name: value.clone() for name, value in model.state_dict().items()}


def counted(folder):
    """Train on ten batches, in accumulation windows of 4, 4 and 2 batches unless the case changes the count."""
    cases = {
        "plain": (SteppedNet, ACCUMULATED, {}),
        "amp": (SteppedNet, BF16, {}),
        "parts": (Parts, ACCUMULATED, {}),
        "static": (SteppedNet, ACCUMULATED, dict(static_graph=True)),
        "each": (SteppedNet, dict(ACCUMULATED, accumulative_counts=1), {}),
    }
    answers = {}
    for name, (model, optim, options) in cases.items():
        counter = Counter()
        kind = "MMSeparateDistributedDataParallel" if model is Parts else "MMDistributedDataParallel"
        cfg = dict(model_wrapper_cfg=dict(type=kind, **options))
        runner = train(folder / name, 2, model(), prepare=counter, optim_wrapper=optim, cfg=cfg)
        answers[name] = counter.syncs, state(runner)
    return answers


@contextlib.contextmanager
def wire():
    """Record the dtype and size of every all-reduce called from Python."""
    seen, original = [], torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        seen.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    try:
        yield seen
    finally:
        torch.distributed.all_reduce = original


def gradients(hook, model=None, steps=1, size=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 20)) if model is None else model
    # With small buckets, several are in flight concurrently, and DDP rebuilds them after the first step.
    model = MMDistributedDataParallel(model, comm_hook=hook, bucket_cap_mb=0.002)
    generator = torch.Generator().manual_seed(get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(size, 24, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()], model


def compressed(folder):
    train(folder / "group", 2, max_epochs=1)
    exact, _ = gradients(None, steps=2)
    answers = {"exact": exact}
    for kind in ("bf16", "fp16"):
        with wire() as seen:
            answers[kind] = gradients(kind, steps=2)[0]
        answers[f"{kind} wire"] = seen
    return answers


def trained(folder):
    answers = {}
    for name, hook in dict(exact=None, bf16="bf16", fp16="fp16").items():
        losses = LossOfEachStep()
        cfg = dict(model_wrapper_cfg=dict(type="MMDistributedDataParallel", comm_hook=hook))
        runner = train(folder / name, 2, max_epochs=8, custom_hooks=[losses], cfg=cfg)
        answers[name] = losses.losses, state(runner), runner.model.broadcast_buffers
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [counted, compressed, trained]
    return run_in_two(functions, tmp_path_factory.mktemp("options"))


def both(answers, name):
    for answer in answers[name]:
        assert not isinstance(answer, str), answer
    return answers[name]


def assert_close(one, other, tolerance=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", ["plain", "amp", "parts"])
def test_gradients_are_synced_once_per_window(answers, name):
    for syncs, _ in (answer[name] for answer in both(answers, "counted")):
        assert set(syncs.values()) == {3}
        assert len(syncs) == (2 if name == "parts" else 1)


def test_gradients_are_synced_in_every_step_without_accumulation(answers):
    assert [set(answer["each"][0].values()) for answer in both(answers, "counted")] == [{10}, {10}]


@pytest.mark.parametrize(("name", "model"), [("plain", SteppedNet), ("parts", Parts)])
def test_accumulation_in_two_processes_matches_one_process(answers, tmp_path, name, model):
    alone = state(train(tmp_path, 1, model(), optim_wrapper=ACCUMULATED))
    first, second = (answer[name][1] for answer in both(answers, "counted"))
    assert_close(first, second, 0)
    assert_close(first, alone)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_hook_sends_half_precision_gradients(answers, kind, dtype):
    for answer in both(answers, "compressed"):
        sizes = [size for sent, size in answer[f"{kind} wire"] if sent == dtype]
        assert len(sizes) == len(answer[f"{kind} wire"]) > 2  # the second step has several buckets
        assert sum(sizes) == 2 * sum(g.numel() for g in answer["exact"])
        for exact, rounded in zip(answer["exact"], answer[kind], strict=True):
            assert rounded.dtype == torch.float32
            # The gradient of each rank and their sum are each rounded once.
            assert (exact - rounded).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
            assert not torch.equal(exact, rounded)


def test_training_converges_and_ranks_stay_equal_with_every_hook(answers):
    first, second = both(answers, "trained")
    for name, (losses, weights, broadcasts) in first.items():
        assert_close(weights, second[name][1], 0)
        assert not broadcasts
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    for name in ("bf16", "fp16"):
        assert sum(first[name][0]) == pytest.approx(sum(first["exact"][0]), rel=0.1)
        assert first[name][0] != first["exact"][0]
