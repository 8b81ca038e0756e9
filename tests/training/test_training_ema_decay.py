"""Tests of user-defined EMA decay schedules. The expected averages are computed in a loop."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.training import Callback, Trainer
from slipstream.training.user_schedules import EMA_DECAY_FUNCTIONS, IDecayFunction


class LinearDecay(IDecayFunction):
    """Increase the decay linearly."""

    def __init__(self, slope=1.0, **kwargs):
        self.slope = slope

    def __call__(self, decay, step, total_steps):
        return decay * min(1.0, self.slope * step / total_steps)


class Weights(Callback):
    """Record the weight after each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_gradient_step_end(self, context):
        self.steps.append(context.net.weight.detach().double().clone())


@pytest.fixture(autouse=True)
def _registered():
    EMA_DECAY_FUNCTIONS["linear_of_the_test"] = LinearDecay
    yield
    del EMA_DECAY_FUNCTIONS["linear_of_the_test"]


def train(folder, window=1, speed=None, **ema_params):
    torch.manual_seed(0)
    net, weights = nn.Linear(3, 2), Weights()
    inputs, labels = torch.randn(24, 3), torch.randint(2, (24,))
    Trainer("run", str(folder)).train(
        net,
        dict(
            max_epochs=2, initial_lr=0.5, loss="CrossEntropyLoss", ema=True, silent_mode=True, metric_to_watch=None,
            ema_params={"decay": 0.9, "decay_type": "linear_of_the_test", "beta": 15, **ema_params}, speed=speed,
            batch_accumulate=window, phase_callbacks=[weights], average_best_models=False,
        ),
        DataLoader(TensorDataset(inputs, labels), batch_size=4),
    )  # fmt: skip
    return torch.load(folder / "run/ckpt_latest.pth", weights_only=True)["state_dict"][
        "network.weight"
    ], weights.steps


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("speed", [None, {"compile": {"scope": "step", "backend": "aot_eager"}}])
def test_the_decay_schedule_counts_batches(tmp_path, window, speed):
    found, steps = train(tmp_path, window, speed, slope=1.5)
    wanted = steps[0]  # the first update copies the weights
    for update, weight in enumerate(steps[1:], start=2):
        decay = 0.9 * min(1.0, 1.5 * update * window / 12)
        wanted = decay * wanted + (1 - decay) * weight
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
