"""Test that the averaged weights of two processes match those of one process with the whole batch."""

import pytest
import torch
from sharded_runs import FSDP, SGD, Net, Record, assert_same, full, make
from two_processes import run_in_two

from slipstream.hooks import EMAHook
from slipstream.model import AveragePart, unwrap_model

SCHEDULED = dict(type="EMAHook", ema_type="ScheduledEMA", decay=0.8, beta=3.0)
WINDOWS = dict(SGD, accumulative_counts=2)


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


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [ddp, fsdp, swa, resumed]
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
