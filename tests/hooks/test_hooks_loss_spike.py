"""LossSpikeHook warns about losses far above their recent median."""

import random
import statistics

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.model import BaseModel
from tiny_runs import loader, run


class Replay(BaseModel):
    """A model that returns the losses in a list, one for each step."""

    def __init__(self, losses):
        super().__init__()
        self.weight, self.losses = torch.nn.Parameter(torch.zeros(())), iter(losses)

    def forward(self, inputs, targets, mode):
        return {"loss": self.weight * 0 + next(self.losses)}


def spikes(tmp_path, losses, **options):
    """Return the iterations that the hook warns about in a run with these losses."""
    run(
        tmp_path,
        model=Replay(losses),
        train_cfg=dict(by_epoch=False, max_iters=len(losses)),
        train_dataloader=loader(),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=7)),
        custom_hooks=[dict(type="LossSpikeHook", **options)],
    )
    lines = next(tmp_path.glob("*/*.log")).read_text().splitlines()
    return [int(line.split(" at iteration ")[1].split(",")[0]) for line in lines if "'loss' rose to" in line]


def noisy(count):
    generator = random.Random(0)
    return [2.0 + generator.gauss(0, 0.1) for _ in range(count)]


def test_one_warning_for_each_spike(tmp_path):
    losses = noisy(170)
    losses[100:110] = [9.0] * 10
    losses[150] = 4.0
    assert spikes(tmp_path, losses) == [101, 151]


def test_patience_is_the_number_of_consecutive_steps_above_the_limit(tmp_path):
    losses = noisy(120)
    losses[80] = 9.0
    losses[100:103] = [9.0] * 3
    assert spikes(tmp_path, losses, patience=3) == [103]


@pytest.mark.parametrize("difference", [-1e-4, 1e-4])
def test_limit_is_the_median_plus_a_multiple_of_the_scaled_deviation(tmp_path, difference):
    losses = noisy(60)
    middle = statistics.median(losses)
    limit = middle + 5 * 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    found = spikes(tmp_path, [*losses, limit + difference], threshold=5.0)
    assert found == ([61] if difference > 0 else [])


def test_unknown_loss_raises_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"custom_hooks\[0\]\.monitor: .*'los'; did you mean 'loss'"):
        spikes(tmp_path, noisy(10), monitor="los")
