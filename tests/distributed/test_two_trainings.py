import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from two_processes import run_in_two

from slipstream import accelerate
from slipstream.dist import get_rank
from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.registry import MODEL_WRAPPERS
from slipstream.runner import Runner

SAMPLES, BATCH, EPOCHS = 22, 4, 2


class Samples(Dataset):
    def __init__(self, size=SAMPLES):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(size, n, generator=generator) for n in (3, 1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], int(index)


class Net(BaseModel):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x, y, index, mode):
        out = self.net(x)
        return {"loss": (out - y).square().mean()} if mode == "loss" else index


class Seen(BaseMetric):
    """A metric that counts the samples and checks their order."""

    def process(self, data_batch, data_samples):
        self.results += data_samples.tolist()

    def compute_metrics(self, results):
        return {"count": len(results), "in_order": float(results == list(range(len(results))))}


@MODEL_WRAPPERS.register_module()
class Custom(DistributedDataParallel):
    pass


def train(folder, world, net=None, cfg=None, **options):
    """Train with BATCH samples per step over all processes. Return the weights and the Runner."""
    parts = dict(
        train_dataloader=dict(
            dataset=Samples(20), batch_size=BATCH // world, sampler=dict(type="DefaultSampler", shuffle=True)
        ),
        train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=None),
        launcher="pytorch" if world > 1 else "none",
        randomness=dict(seed=3),
        env_cfg=dict(dist_cfg=dict(backend="nccl", timeout=30)),  # as in MMEngine configs
        log_level="ERROR",
        cfg=cfg,
    )
    runner = Runner(net or Net(), folder / f"world{world}", **{**parts, **options})
    model = runner.train()
    return {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}, runner


def validation(folder):
    loader = dict(dataset=Samples(), batch_size=3, sampler=dict(type="DefaultSampler", shuffle=False))
    metrics = []
    for size in (21, 22):
        val = dict(loader, dataset=Samples(size))
        options = dict(val_dataloader=val, val_cfg=dict(), val_evaluator=dict(type=Seen))
        runner = Runner(Net(), folder, launcher="pytorch", log_level="ERROR", **options)
        metrics.append(runner.val())
    return metrics


class Output(BaseMetric):
    """A metric that depends on every running statistic."""

    def process(self, data_batch, data_samples):
        self.results.append(float(data_samples.square().sum()))

    def compute_metrics(self, results):
        return {"output": sum(results)}


class Answering(Net):
    def forward(self, x, y, index, mode):
        return self.net(x) if mode == "predict" else super().forward(x, y, index, mode)


def own_statistics(folder):
    """Validate during training, and validate the written checkpoint."""
    val = dict(
        val_dataloader=dict(dataset=Samples(), batch_size=3), val_cfg=dict(), val_evaluator=dict(type=Output)
    )
    hooks = dict(checkpoint=dict(type="CheckpointHook"))
    runner = train(folder, 2, Answering(norm=True), default_hooks=hooks, **val)[1]
    during = runner.message_hub.get_scalar("val/output").current()
    saved = folder / "world2" / f"epoch_{EPOCHS}.pth"
    again = Runner(
        Answering(norm=True), folder, load_from=saved, launcher="pytorch", log_level="ERROR", **val
    )
    return during, again.val()["output"]


def modes(folder):
    """Return the batches that BatchNorm counted in models that were in evaluation mode, as a whole and in part."""
    counted = []
    for module in (lambda net: net, lambda net: net.net[1]):
        net = Net(norm=True)
        module(net).eval()
        counted.append(int(train(folder, 2, net)[0]["net.1.num_batches_tracked"]))
    return counted


class Unfreezes(Hook):
    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.model.requires_grad_(True)


class Freezes(Hook):
    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.model.net[0].requires_grad_(False)


def freezing(folder, world=2):
    """Return the weights after training with a layer that a hook freezes after the first epoch."""
    results = []
    for speed in ({}, dict(accumulate=3)):
        state = train(folder, world, Net(), custom_hooks=[Freezes()], speed=speed)[0]
        results.append(torch.cat([value.flatten() for value in state.values()]).numpy())
    return results


def unfreezing(folder, world=2):
    """Return the weights after training with a layer that is frozen in the first epoch."""
    results = []
    for options in ({}, dict(parallel=dict(type="ddp", comm_hook="bf16")), dict(accumulate=3)):
        net = Net()
        net.net[0].requires_grad_(False)
        speed = options if world > 1 or "accumulate" in options else {}
        state = train(folder, world, net, custom_hooks=[Unfreezes()], speed=speed)[0]
        results.append(torch.cat([value.flatten() for value in state.values()]).numpy())
    return results


def own_loops(folder):
    """Return whether `accelerate` warns of equal batches, without and with a distributed sampler."""
    warned = []
    for sampler in (None, DistributedSampler(Samples(20))):
        net = nn.Sequential(nn.Linear(3, 1))
        step = accelerate(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.functional.mse_loss, {})
        for batch in DataLoader(Samples(20), 4, sampler=sampler, shuffle=sampler is None):
            step(batch[:2])
        warned.append("train on the same batch" in step.summary())
    return warned


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.linear(x)

    def loss(self, x, y):
        return self.distance(self(x), y)

    def distance(self, outputs, targets):
        return (self.scale * (outputs - targets)).square().mean()


def batch_losses():
    """Ways to compute the loss of a batch with a method, a submodule or the model itself."""
    return {
        "loss_fn": None,  # the method `distance`
        "method": lambda model, batch: model.loss(*batch),
        "submodule": lambda model, batch: {"loss": model.distance(model.linear(batch[0]), batch[1])},
        "two calls": lambda model, batch: model.loss(*batch) + 0 * model(batch[0]).sum(),
    }


def methods(folder, world=2):
    """Return the weights after 6 batches of 8 / `world` samples, by the form of the loss and the options."""
    results = {}
    for name, compute_loss in batch_losses().items():
        for speed in ({}, dict(accumulate=2), dict(find_unused_parameters=True)):
            net, generator = WithLoss(), torch.Generator().manual_seed(0)
            step = accelerate(
                net,
                torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
                net.distance if compute_loss is None else None,
                compute_loss=compute_loss,
                speed=speed if world > 1 or "accumulate" in speed else {},
            )
            for _ in range(6):
                x = torch.randn(8, 3, generator=generator)
                part = slice(get_rank(), None, world)
                step((x[part], x.sum(1, keepdim=True)[part]))
            results[f"{name} {sorted(speed)}"] = net.linear.weight.detach().flatten().tolist()
    return results


class WaitsOnOneRank(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 2 and get_rank() == 1:
            time.sleep(2)


def limited(folder, world=2):
    """Return the iteration of a time limit, the epoch means and metrics of the resumed run, and its weights."""
    loaders = {name: dict(dataset=Samples(size), batch_size=3) for name, size in (("a", 21), ("b", 8))}
    options = dict(val_dataloader=loaders, val_cfg=dict(), val_evaluator=["loss", dict(type=Seen)])
    hooks = dict(preemption=dict(max_time=1.5)) if world > 1 else {}
    waits = [WaitsOnOneRank()] if world > 1 else []
    runner = train(folder, world, custom_hooks=waits, default_hooks=hooks, **options)[1]
    state, again = train(folder, world, resume=True, **options)
    means = [float(value) for value in again.message_hub.get_scalar("train_epoch/loss").data[0]]
    metrics = again.val()
    return runner.iter, means, metrics, torch.cat([value.flatten() for value in state.values()]).numpy()


FUNCTIONS = [own_statistics, validation, modes, freezing, unfreezing, own_loops, methods, limited]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two(FUNCTIONS, tmp_path_factory.mktemp("trainings"))


@pytest.mark.parametrize("which", [0, 1])
def test_validation_counts_each_sample_once_in_order(answers, which):
    for rank in (0, 1):
        metrics = answers["validation"][rank]
        assert isinstance(metrics, list), metrics
        assert metrics[which] == {"count": 21 + which, "in_order": 1.0}


def test_checkpoint_contains_the_validated_batchnorm_statistics(answers):
    for answer in answers["own_statistics"]:
        assert not isinstance(answer, str), answer
        during, again = answer
        assert during == pytest.approx(again, rel=1e-6)


def test_only_parts_of_a_model_stay_in_evaluation_mode(answers):
    assert answers["modes"] == [[EPOCHS * 20 // BATCH, 0]] * 2


def test_a_hook_may_freeze_parameters_in_two_processes(answers, tmp_path):
    expected = freezing(tmp_path, world=1)
    for answer in answers["freezing"]:
        assert not isinstance(answer, str), answer
        for found, right in zip(answer, expected, strict=True):
            assert found == pytest.approx(right, rel=1e-6, abs=1e-6)


def test_gradients_of_parameters_that_a_hook_unfreezes_are_averaged(answers, tmp_path):
    expected = unfreezing(tmp_path, world=1)
    assert not (expected[0] == expected[2]).all()
    for answer in answers["unfreezing"]:
        assert not isinstance(answer, str), answer
        for found, right, tolerance in zip(answer, expected, (1e-6, 1e-2, 1e-6), strict=True):
            assert found == pytest.approx(right, rel=tolerance, abs=tolerance)


def test_own_loops_without_a_distributed_sampler_are_reported(answers):
    assert answers["own_loops"] == [[True, False]] * 2


def test_compute_loss_may_call_methods_and_submodules_in_two_processes(answers, tmp_path):
    expected = methods(tmp_path, world=1)
    for answer in answers["methods"]:
        assert not isinstance(answer, str), answer
        assert list(answer) == list(expected)
        for name, weights in answer.items():
            assert weights == pytest.approx(expected[name], rel=1e-5), name


def test_time_limit_epoch_means_and_several_loaders_in_two_processes(answers, tmp_path):
    _, means, metrics, weights = limited(tmp_path, world=1)
    assert {name: metrics[name] for name in ("a/count", "b/in_order")} == {"a/count": 21, "b/in_order": 1.0}
    stops = set()
    for answer in answers["limited"]:
        assert not isinstance(answer, str), answer
        stops.add(answer[0])
        assert answer[1] == pytest.approx(means, rel=1e-5)
        assert answer[2] == pytest.approx(metrics, rel=1e-5)
        assert answer[3] == pytest.approx(weights, rel=1e-4, abs=1e-6)
    assert len(stops) == 1
    assert 3 <= min(stops) < 5 * EPOCHS
