"""Tests of the options that are implemented as step parts: combined results, insertion order and errors."""

import pytest
import torch
import torch.nn.functional as F
from test_speed_adaptive_clip import clipped
from test_speed_gradient_centralization import centralized
from test_speed_layer_decay import per_layer
from test_speed_sam import RHO, perturbed

from part_runs import HOW, Net, assert_equal, batches, by_hand, run, sgd, trained
from slipstream.errors import ConfigError
from slipstream.optim import OptimWrapper, OptimWrapperDict

ALL = dict(
    gradient_centralization=True, adaptive_clip=dict(clip_factor=0.02), layer_decay=0.75, sam=dict(rho=RHO)
)


def changed(params, grads):
    return clipped(params, centralized(params, grads))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_all_parts_match_a_plain_training_loop(how, together):
    expected = by_hand(gradients=perturbed, change=changed, groups=per_layer(), together=together)
    assert_equal(trained(how, together=together, **ALL), expected)


# ---- swa --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("accumulate", "interval"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_swa_averages_every_kth_update(how, accumulate, interval):
    seen = []
    model = Net()
    optimizer = sgd(model.parameters())
    for number, (x, y) in enumerate(batches(), 1):
        (F.cross_entropy(model(x), y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            seen.append({name: param.detach().clone() for name, param in model.named_parameters()})
    ema = dict(type="swa", interval=interval)
    average = trained(how, ema=ema, accumulate=accumulate)[2]
    # In the compiled step, the averaging weight 1 / n is a float32 tensor.
    rtol = 1e-6 if how == "compiled" else 1e-9
    for name in seen[0]:
        mean = torch.stack([weights[name] for weights in seen[::interval]]).mean(0)
        torch.testing.assert_close(average[name], mean, rtol=rtol, atol=1e-9)


# ---- custom models and wrappers ---------------------------------------------------------------------------


class OwnStep(Net):
    """A model that overrides `train_step`."""

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            loss = self(*data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def test_before_and_after_update_run_for_a_model_that_overrides_train_step(tmp_path):
    around = {name: value for name, value in ALL.items() if name != "sam"}
    found, _ = run(tmp_path, "eager", model=OwnStep(), **around)
    assert_equal(found, by_hand(change=changed, groups=per_layer()))


class TwoOptimizers(OwnStep):
    def train_step(self, data, optim_wrapper):
        loss = self(*data, mode="loss")["loss"]
        for wrapper in optim_wrapper.values():
            wrapper.zero_grad()
        loss.backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
        return {"loss": loss.detach()}


def test_each_of_several_optimizers_has_its_own_parts(tmp_path):
    model = TwoOptimizers()
    head = list(model.head.parameters())
    body = [param for param in model.parameters() if all(param is not other for other in head)]
    wrapper = OptimWrapperDict(body=OptimWrapper(sgd(body)), head=OptimWrapper(sgd(head)))
    around = {name: value for name, value in ALL.items() if name != "sam"}
    found, _ = run(tmp_path, "eager", model=model, optimizer=wrapper, **around)
    assert_equal(found, by_hand(change=changed, groups=per_layer()))


class Ignores(OptimWrapper):
    def step(self, **kwargs):
        self.optimizer.step(**kwargs)


class IgnoresLater(OptimWrapper):
    def update_params(self, loss, **kwargs):
        loss.backward()
        self.optimizer.step()
        super().zero_grad()


@pytest.mark.parametrize(("kind", "method"), [(Ignores, "step"), (IgnoresLater, "update_params")])
def test_wrapper_that_ignores_parts_raises_an_error(kind, method, tmp_path):
    model = Net()
    message = rf"speed\.gradient_centralization: .*{kind.__name__}\.{method} overrides OptimWrapper\.{method}"
    with pytest.raises(ConfigError, match=message):
        run(
            tmp_path,
            "eager",
            model=model,
            optimizer=kind(sgd(model.parameters())),
            gradient_centralization=True,
        )
