"""Tests of building schedulers: invalid arguments, configurations and custom schedulers."""

import pytest
import torch
from scheduled import Wrapper, history, sgd

from slipstream.errors import ConfigError
from slipstream.optim import scheduler as schedules
from slipstream.optim.scheduler import (
    INF,
    LRSchedulerMixin,
    StepLR,
    TorchSchedulerAdapter,
    _ParamScheduler,
    build_param_scheduler,
)

# ---- invalid input ------------------------------------------------------------------------------

BAD = [
    ("StepLR", {"step_size": 2, "begin": 5, "end": 5}, "end: must be"),
    ("StepLR", {"step_size": 2, "begin": -1}, "begin: must be"),
    ("ExponentialLR", {"gamma": -1.0}, "gamma: must be"),
    ("MultiStepLR", {"milestones": []}, "milestones: must be"),
    ("MultiStepLR", {"milestones": 8}, "milestones: must be"),
    ("ConstantLR", {"factor": 0}, "factor: must be"),
    ("ConstantLR", {"factor": 2.0}, "factor: must be"),
    ("LinearLR", {"start_factor": 0, "end": 5}, "start_factor: must be"),
    ("LinearLR", {"end_factor": 1.5, "end": 5}, "end_factor: must be"),
    ("PolyLR", {}, "end must be specified"),
    ("PolyLR", {"power": 0, "end": 5}, "power: must be"),
    ("CosineAnnealingLR", {"T_max": 0}, "T_max: must be"),
    ("CosineAnnealingLR", {"T_max": 2.5}, "T_max: must be"),
    ("CosineRestartLR", {"periods": []}, "periods: must be"),
    ("CosineRestartLR", {"periods": [3, 0]}, r"periods: must be"),
    ("OneCycleLR", {"eta_max": 0, "total_steps": 5}, "eta_max: must be"),
    ("OneCycleLR", {"eta_max": [1.0], "total_steps": 5}, "eta_max: must be"),
    ("ReduceOnPlateauLR", {"factor": 1.0}, "factor: must be"),
    ("ReduceOnPlateauLR", {"rule": "min"}, "rule: must be"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_error_for_invalid_arguments_names_the_argument(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        getattr(schedules, name)(sgd(), **arguments)


# ---- construction -------------------------------------------------------------------------------


def test_end_defaults_to_the_length_of_the_run():
    by_epoch = build_param_scheduler({"type": "PolyLR"}, sgd(), max_epochs=12, max_iters=600)
    by_iter = build_param_scheduler(
        {"type": "PolyLR", "by_epoch": False}, sgd(), max_epochs=12, max_iters=600
    )
    assert (by_epoch.end, by_iter.end) == (12, 600)
    assert build_param_scheduler({"type": "StepLR", "step_size": 2}, sgd()).end == INF


def test_convert_to_iter_based_scales_all_arguments_that_count_epochs():
    cfg = {"convert_to_iter_based": True, "begin": 1, "end": 4}

    def build(name, **arguments):
        return build_param_scheduler({"type": name, **cfg, **arguments}, sgd(), epoch_length=10)

    cosine = build("CosineAnnealingLR", T_max=3)
    assert (cosine.begin, cosine.end, cosine.T_max, cosine.by_epoch) == (10, 40, 30, False)
    assert build("MultiStepLR", milestones=[1, 2]).milestones == {10: 1, 20: 1}
    assert build("StepLR", step_size=2).step_size == 20
    assert build("CosineRestartLR", periods=[1, 2], restart_weights=[1, 1]).periods == [10, 20]
    assert build("OneCycleLR", eta_max=1.0, total_steps=3).total_steps == 30
    assert build("LinearLR").total_iters == 29
    assert build("CosineAnnealingLR").T_max == 30


@pytest.mark.parametrize("options", [{}, {"end": None}], ids=str)
def test_torch_schedulers_are_built_by_name_and_adapted(options):
    cfg = {"type": "CyclicLR", "base_lr": 0.1, "max_lr": 0.5, "step_size_up": 4, "cycle_momentum": False}
    optimizer, plain = sgd(), sgd()
    adapter = build_param_scheduler({**cfg, **options, "by_epoch": False}, Wrapper(optimizer), max_iters=7)
    assert isinstance(adapter, TorchSchedulerAdapter)
    assert not adapter.by_epoch
    cfg.pop("type")
    theirs = torch.optim.lr_scheduler.CyclicLR(plain, **cfg)
    plain.step()  # avoid torch's warning about the call order
    for _ in range(6):
        adapter.step()
        theirs.step()
        assert adapter.get_last_value() == theirs.get_last_lr()
    last = adapter.get_last_value()
    adapter.step()  # the scheduler stops at `end`
    assert adapter.get_last_value() == last


def test_adapter_restores_a_torch_scheduler():
    cfg = {"type": "LambdaLR", "lr_lambda": lambda step: 0.5**step, "by_epoch": True}
    first, second = sgd(), sgd()
    adapter = build_param_scheduler(cfg, first)
    for _ in range(3):
        adapter.step()
    resumed = build_param_scheduler(cfg, second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(adapter.state_dict())
    adapter.step()
    resumed.step()
    assert adapter.get_last_value() == resumed.get_last_value() == pytest.approx([0.1 / 16, 0.05 / 16])


def test_scheduler_objects_are_accepted():
    optimizer = sgd()
    mine = StepLR(optimizer, 2)
    assert build_param_scheduler(mine, optimizer) is mine
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert build_param_scheduler(theirs, Wrapper(optimizer)).scheduler is theirs


torch_lr = torch.optim.lr_scheduler


def by_epoch_of(make, **options):
    optimizer = sgd()
    scheduler = make(optimizer)
    return build_param_scheduler(
        {"scheduler": scheduler, **options} if options else scheduler, optimizer
    ).by_epoch


@pytest.mark.parametrize(
    ("make", "by_epoch"),
    [
        (lambda o: torch_lr.OneCycleLR(o, 0.1, total_steps=5), False),
        (lambda o: torch_lr.CyclicLR(o, 0.1, 0.2), False),
        (lambda o: torch_lr.StepLR(o, 2), True),
        (lambda o: torch_lr.CosineAnnealingLR(o, 5), True),
        (lambda o: torch_lr.SequentialLR(o, [torch_lr.LinearLR(o), torch_lr.StepLR(o, 2)], [3]), True),
    ],
)
def test_torch_schedulers_step_as_torch_documents(make, by_epoch):
    assert by_epoch_of(make) is by_epoch
    assert by_epoch_of(make, by_epoch=not by_epoch) is not by_epoch


def test_scheduler_of_another_optimizer_raises_an_error():
    for make in (StepLR, torch_lr.StepLR):
        with pytest.raises(ConfigError, match="StepLR was created for a different optimizer"):
            build_param_scheduler(make(sgd(), 2), sgd())


# ---- custom schedulers ---------------------------------------------------------------------------


class HalvingParamScheduler(_ParamScheduler):
    """A scheduler written as in MMEngine's documentation."""

    def __init__(self, optimizer, param_name, total, **kwargs):
        self.total = total
        self.total_iters = total
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self):
        factor = 0.5 if 0 < self.last_step <= self.total else 1.0
        return [group[self.param_name] * factor for group in self.optimizer.param_groups]


class HalvingLR(LRSchedulerMixin, HalvingParamScheduler):
    pass


def test_custom_scheduler_with_get_value_is_applied():
    optimizer = sgd()
    values = [v[0] for v in history(optimizer, [HalvingLR(optimizer, total=2)], 5)]
    assert values == pytest.approx([0.1, 0.05, 0.025, 0.025, 0.025])


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_scheduler_that_begins_after_the_end_of_the_run_raises_an_error(by_epoch):
    cfg = dict(type="PolyLR", begin=10, by_epoch=by_epoch)
    with pytest.raises(ConfigError, match="begin: is 10, but the run is only 10 long; train longer"):
        build_param_scheduler(cfg, sgd(), max_epochs=10, max_iters=10)
    assert build_param_scheduler(cfg, sgd(), max_epochs=11, max_iters=11).begin == 10
