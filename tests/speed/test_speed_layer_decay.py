"""Layer decay matches a plain loop with one learning rate per layer."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from part_runs import HOW, Net, adamw, assert_equal, batches, by_hand, differ, run, sgd, trained
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.optim import ZeroRedundancyOptimizer
from slipstream.speed import SpeedPlan
from slipstream.speed.accelerate import accelerate
from slipstream.speed.layer_decay import LayerDecayOptions, layer_factors, scales_with_lr

DEPTHS = [("stem", 4), ("norm", 4), ("blocks.0", 3), ("blocks.1", 2), ("blocks.2", 1), ("head", 0)]


def per_layer(decay=0.75, depths=DEPTHS):
    def change(model, optimizer):
        for (name, _), group in zip(model.named_parameters(), optimizer.param_groups, strict=True):
            (depth,) = (depth for prefix, depth in depths if name.startswith(prefix + "."))
            group["lr"] *= decay**depth

    return change


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_layer_decay_matches_manual_learning_rates(how, together):
    expected = by_hand(groups=per_layer(), together=together)
    assert differ(expected, by_hand(together=together))
    assert_equal(trained(how, together=together, layer_decay=True), expected)


@pytest.mark.parametrize("how", HOW)
def test_layers_can_be_listed_from_input_to_output(how):
    options = dict(decay=0.5, layers=["stem", "norm"])
    depths = [("stem", 2), ("norm", 1), ("blocks", 0), ("head", 0)]
    assert_equal(trained(how, adamw, layer_decay=options), by_hand(adamw, groups=per_layer(0.5, depths)))


@pytest.mark.parametrize("how", HOW)
def test_layer_decay_in_a_runner_matches_a_plain_loop(how, tmp_path):
    found, _ = run(tmp_path, how, together=True, layer_decay=dict(decay=0.6))
    assert_equal(found, by_hand(groups=per_layer(0.6), together=True))


@pytest.mark.parametrize("how", HOW)
def test_scheduler_set_by_the_user_is_kept(how):
    torch._dynamo.reset()
    model, hand = Net(), Net()
    optimizer = sgd(model.parameters())
    schedule = StepLR(optimizer, 3, 0.5)
    step = accelerate(model, optimizer, nn.functional.cross_entropy, dict(layer_decay=0.7, compile=HOW[how]))
    own = sgd([{"params": [p]} for p in hand.parameters()])
    per_layer(0.7)(hand, own)
    own_schedule = StepLR(own, 3, 0.5)
    for x, y in batches():
        step((x, y))
        nn.functional.cross_entropy(hand(x), y).backward()
        own.step()
        own.zero_grad()
        schedule.step()
        own_schedule.step()
    torch.testing.assert_close(model.state_dict(), hand.state_dict(), rtol=1e-9, atol=1e-12)


# ---- depths -----------------------------------------------------------------------------------------------


class Stages(nn.Module):
    """A network with blocks inside stages, a parameter of the model itself, and a layer between stages."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(2))
        self.stages = nn.ModuleList(
            [nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
        )
        self.between = nn.Linear(2, 2)
        self.more = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.between.weight


def depths_of(model, layers=None):
    factors = layer_factors(model, LayerDecayOptions(0.5, layers))
    return {name: round(-torch.tensor(factor).log2().item()) for name, factor in factors.items()}


def test_outermost_blocks_are_layers_and_other_modules_belong_to_the_previous_layer():
    found = depths_of(Stages())
    assert found["token"] == 5
    assert found["stages.0.0.0.weight"] == found["stages.0.1.0.bias"] == 4
    assert found["stages.1.1.0.weight"] == 3
    assert found["between.weight"] == found["between.bias"] == 3
    assert [found["more.0.0.weight"], found["more.1.0.weight"], found["head.bias"]] == [2, 1, 0]


def test_listed_layers_keep_their_order():
    found = depths_of(Stages(), ["more.*", "stages.*.*"])
    assert [found["more.0.0.bias"], found["more.1.0.bias"]] == [6, 5]
    assert [found[f"stages.{i}.{j}.0.bias"] for i in (0, 1) for j in (0, 1)] == [4, 3, 2, 1]


# ---- optimizers -------------------------------------------------------------------------------------------

PROPORTIONAL = dict(
    Adadelta=dict(lr=1.0),
    Adagrad=dict(lr=0.05, lr_decay=0.01),
    Adam=dict(lr=0.01, weight_decay=0.1, amsgrad=True),
    AdamW=dict(lr=0.01, weight_decay=0.1),
    Adamax=dict(lr=0.01, weight_decay=0.1),
    Muon=dict(lr=0.01, weight_decay=0.1),
    NAdam=dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    RAdam=dict(lr=0.01, weight_decay=0.1),
    RMSprop=dict(lr=0.01, momentum=0.9, weight_decay=0.1, centered=True),
    SGD=dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    SparseAdam=dict(lr=0.01),
)
NOT_PROPORTIONAL = dict(ASGD=dict(lr=0.5, lambd=0.1), Adafactor=dict(lr=0.5), LBFGS={}, Rprop={})


def test_all_torch_optimizers_are_classified():
    kinds = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert kinds - {"Optimizer"} == PROPORTIONAL.keys() | NOT_PROPORTIONAL.keys()


class Scaled(nn.Module):
    """A network of three matrices, because Muon supports only matrices."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(3)])
        for param in self.parameters():
            param.data = torch.randn(4, 4, generator=generator, dtype=torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def rates_by_hand(kind, options, steps=12):
    model = Scaled()
    options = dict(options)
    lr = options.pop("lr")
    groups = [
        {"params": [p], "lr": lr * 0.5**depth} for p, depth in zip(model.parameters(), (3, 2, 1), strict=True)
    ]
    optimizer = kind(groups, lr=lr, **options)
    for x, y in _pairs(steps):
        nn.functional.mse_loss(model(x), y).backward()
        _as_sparse(optimizer, model)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def decayed(kind, options, steps=12):
    model = Scaled()
    optimizer = kind(model.parameters(), **options)
    step = accelerate(model, optimizer, nn.functional.mse_loss, dict(layer_decay=0.5))
    step.optim.on_gradients = lambda: _as_sparse(optimizer, model)
    for batch in _pairs(steps):
        step(batch)
    return model.state_dict()


def _pairs(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64).unbind() for _ in range(steps)]


def _as_sparse(optimizer, model):
    if isinstance(optimizer, torch.optim.SparseAdam):
        for param in model.parameters():
            param.grad = param.grad.to_sparse()


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_accepted_optimizers_match_manual_learning_rates(name):
    kind, options = getattr(torch.optim, name), PROPORTIONAL[name]
    torch.testing.assert_close(decayed(kind, options), rates_by_hand(kind, options), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(NOT_PROPORTIONAL.keys() - {"LBFGS"}))
def test_rejected_optimizers_raise_an_error_because_results_differ(name, monkeypatch):
    kind, options = getattr(torch.optim, name), dict(lr=0.01) | NOT_PROPORTIONAL[name]
    with pytest.raises(ConfigError, match=f"speed.layer_decay: the update of {name} is not .*paramwise_cfg"):
        decayed(kind, options)
    if name == "Rprop":  # with the default bounds, Rprop reaches a step size limit only after many steps
        options["step_sizes"] = (1e-6, 0.011)
    monkeypatch.setattr("slipstream.speed.layer_decay.scales_with_lr", lambda optimizer: True)
    found, expected = decayed(kind, options), rates_by_hand(kind, options)
    assert any(not torch.allclose(found[key], expected[key], rtol=1e-6) for key in found)


class Unknown(torch.optim.Optimizer):
    """An optimizer that pulls the weights towards their initial values, regardless of the learning rate."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                first = self.state[param].setdefault("first", param.clone())
                param.sub_(group["lr"] * param.grad).lerp_(first, 0.1)


def test_third_party_optimizers_are_probed():
    params = [nn.Parameter(torch.zeros(2, 2))]
    assert not scales_with_lr(Unknown(params, lr=0.1))
    assert scales_with_lr(ZeroRedundancyOptimizer(params, "AdamW", lr=0.1))
    assert scales_with_lr(torch.optim.ASGD(params, lambd=0.0))


# ---- invalid input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("0.75", ConfigError, "speed.layer_decay: must be a dict"),
        (1.5, ConfigError, "speed.layer_decay.decay: must be above 0 and at most 1, not 1.5"),
        (dict(decay=0.0), ConfigError, "speed.layer_decay.decay: must be above 0"),
        (dict(dekay=0.5), UnknownNameError, "did you mean 'decay'"),
        (dict(layers=[]), ConfigError, "speed.layer_decay.layers: must not be empty"),
    ],
)
def test_invalid_value_error_contains_the_config_path(value, kind, message):
    with pytest.raises(kind, match=message):
        SpeedPlan.read(dict(layer_decay=value))


def test_model_without_blocks_and_unknown_names_raise_an_error():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"speed\.layer_decay\.layers: the model has no repeated blocks"):
        accelerate(model, sgd(model.parameters()), nn.functional.cross_entropy, dict(layer_decay=True))
    with pytest.raises(ConfigError, match=r"speed\.layer_decay\.layers: no module name or class .* 'stemm'"):
        trained("eager", layer_decay=dict(layers=["stemm"]))
