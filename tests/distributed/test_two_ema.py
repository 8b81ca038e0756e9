"""Test that the averaged weights of two processes match those of one process with the whole batch."""

import pytest
import torch
from sharded_runs import FSDP, SGD, Net, Record, assert_same, full, make
from torch import nn
from two_processes import run_in_two

from slipstream import accelerate
from slipstream.dist import all_reduce_params, get_rank
from slipstream.hooks import EMAHook, Hook
from slipstream.model import unwrap_model
from slipstream.step.average import AveragePart

SCHEDULED = dict(type="EMAHook", ema_type="ScheduledEMA", decay=0.8, beta=3.0)
WINDOWS = dict(SGD, accumulative_counts=2)


class OtherStep:
    """A step that has no parts, so the hook updates the average."""

    def __init__(self, step):
        self.step = step

    def __call__(self, batch):
        return self.step(batch)


class UseOtherStep(Hook):
    priority = "VERY_HIGH"

    def before_train(self, runner):
        runner.step = OtherStep(runner.step)


def averaged(folder, parallel=None, world=2, hook=SCHEDULED, hooks=(), norm=False, **changes):
    """Train. Return weights, average, losses and validation errors."""
    record = Record()
    changes.setdefault("cfg", dict(parallel=parallel))
    runner = make(
        folder,
        world=world,
        model=Net(norm=norm),
        **{"optim": WINDOWS, "epochs": 3, **changes},
        custom_hooks=[record, hook, *hooks],
    )
    runner.train()
    average = next(h for h in runner.hooks if isinstance(h, EMAHook)).ema_model
    states = {"own": unwrap_model(runner.model).state_dict(), "average": average.state_dict()}
    return {
        "weights": full({name: dict(state) for name, state in states.items()}),
        "losses": torch.stack(record.losses),
        "errors": record.errors,
        "norms": None,
        "optimizer": {},
        "in_step": any(isinstance(part, AveragePart) for part in runner.optim_wrapper.parts),
    }


def ddp(folder, world=2):
    return averaged(folder, "ddp" if world > 1 else None, world)


def fsdp(folder, world=2):
    return averaged(folder, FSDP if world > 1 else None, world)


def swa(folder, world=2):
    hook = dict(type="EMAHook", ema_type="StochasticWeightAverage", begin_epoch=2)
    return averaged(folder, FSDP if world > 1 else None, world, hook)


def ddp_after_step(folder):
    return averaged(folder, "ddp", hooks=[UseOtherStep()])


def fsdp_after_step(folder):
    return averaged(folder, FSDP, hooks=[UseOtherStep()])


def resumed(folder):
    """Train, and train again from a checkpoint of the first run. BatchNorm statistics differ between ranks."""
    found = []
    for parallel, iteration in (("ddp", 8), (FSDP, 8), ("ddp", 7)):
        own = folder / f"{'ddp' if parallel == 'ddp' else 'fsdp'}{iteration}"
        checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=iteration, by_epoch=False))
        options = dict(parallel=parallel, norm=True, default_hooks=checkpoints)
        whole = averaged(own / "whole", **options)
        name = f"iter_{iteration}" + (".pth" if parallel == "ddp" else ".sharded")
        found.append((whole, averaged(own / "rest", **options, resume=str(own / "whole" / name))))
    return found


def own_loop(folder):
    """Train with `accelerate`. Return BatchNorm statistics before and after averaging over the ranks as in the docs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    speed = dict(ema=dict(type="constant", decay=0.5))
    step = accelerate(model, optimizer, speed=speed, compute_loss=lambda model, x: model(x).square().mean())
    for batch in torch.randn(5, 2, 8, 4)[:, get_rank()]:
        step(batch)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    averaged = step.average.module[1].running_mean.clone()
    step.average.sync_buffers()
    all_reduce_params((buffer for buffer in model.buffers() if buffer.is_floating_point()), op="mean")
    with step.averaged():
        validation = model[1].running_mean.clone()
    return {
        "own": (before["1.running_mean"], model[1].running_mean.clone()),
        "average": (averaged, validation),
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [ddp, fsdp, swa, ddp_after_step, fsdp_after_step, resumed, own_loop]
    return run_in_two(functions, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("function", [ddp, fsdp, swa])
def test_average_of_two_processes_matches_one_process(answers, tmp_path, function):
    one = function(tmp_path, world=1)
    for two in answers[function.__name__]:
        assert_same(two, one, rtol=1e-4, atol=1e-6)
        own, average = two["weights"]["own"], two["weights"]["average"]
        for name in own:
            assert not torch.allclose(own[name], average[f"module.{name}"], atol=1e-5), (
                f"the average of {name} equals the weight"
            )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_average_in_the_step_matches_average_in_the_hook(answers, kind):
    for plain, other in zip(answers[kind], answers[f"{kind}_after_step"], strict=True):
        assert_same(other, plain)
        assert (plain["in_step"], other["in_step"]) == (True, False)


def test_own_loop_can_average_the_statistics_of_batch_norm_over_the_ranks(answers):
    first, second = answers["own_loop"]
    for kind in ("own", "average"):
        (before, after), (other_before, other_after) = first[kind], second[kind]
        assert not torch.allclose(before, other_before)
        torch.testing.assert_close(after, (before + other_before) / 2)
        assert torch.equal(after, other_after)


def test_resumed_run_has_the_same_weights_and_average(answers):
    for rank, found in enumerate(answers["resumed"]):
        assert isinstance(found, list), found
        # BatchNorm makes the gradient of stem.bias zero, so the bias consists of rounding errors (1e-9), which depend
        # on the processor. All other weights are larger than 1e-4, so 1e-9 is at most 1e-5 of them.
        # After a resume within a window, DDP sums gradients in a different order, so all values have different rounding
        # errors.
        tolerances = (dict(atol=1e-9), dict(atol=1e-9), dict(rtol=1e-4, atol=1e-7))
        for (whole, rest), tolerance in zip(found, tolerances, strict=True):
            assert 0 < len(rest["losses"]) < len(whole["losses"])
            assert_same(rest, whole, **tolerance)
            name = "module.norm.running_mean"
            assert not torch.equal(
                rest["weights"]["average"][name], rest["weights"]["own"]["norm.running_mean"]
            )
            assert rank == 0 or torch.equal(
                rest["weights"]["average"]["module.head.weight"],
                answers["resumed"][0][0][1]["weights"]["average"]["module.head.weight"],
            )
