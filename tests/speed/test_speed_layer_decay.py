"""Layer decay matches a plain loop with one learning rate per layer."""

import pytest
import torch
from torch import nn

from part_runs import HOW, adamw, assert_equal, by_hand, differ, trained
from slipstream import accelerate
from slipstream.errors import ConfigError
from slipstream.speed.layer_decay import LayerDecayOptions, layer_factors

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


def test_layers_without_parameters_are_not_counted():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    found = depths_of(model, ["0", "1", "2", "3"])
    assert [found["0.bias"], found["2.bias"], found["4.bias"]] == [2, 1, 0]
    with pytest.raises(ConfigError, match=r"^layer_decay.layers: no layer has parameters"):
        depths_of(model, ["ReLU"])


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD])
def test_optimizers_whose_update_is_not_proportional_to_the_learning_rate_raise_an_error(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"does not support {kind.__name__}"):
        accelerate(model, kind(model.parameters()), nn.MSELoss(), {"layer_decay": {"layers": ["0"]}})
