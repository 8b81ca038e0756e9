"""ZeRO-1 in one process matches the plain optimizer. Tests with several processes are in tests/distributed."""

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.optim import ZeroRedundancyOptimizer, build_optim_wrapper


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def trained(optimizer, steps=3, state=None, model=None):
    model = model or network()
    options = dict(lr=0.1, weight_decay=0.01)
    zero = dict(type="ZeroRedundancyOptimizer", optimizer_type=optimizer)
    kind = zero if optimizer != "plain" else dict(type="AdamW")
    cfg = dict(optimizer={**kind, **options}, paramwise_cfg=dict(norm_decay_mult=0.0))
    optim = build_optim_wrapper(model, cfg)
    if state is not None:
        optim.load_state_dict(state)
    for _ in range(steps):
        optim.update_params(model(torch.ones(2, 3)).square().mean())
        for group in optim.param_groups:
            group["lr"] *= 0.5
    return model, optim


@pytest.mark.parametrize("kind", ["AdamW", torch.optim.AdamW])
def test_zero_without_a_process_group_matches_the_plain_optimizer(kind):
    (model, zero), (plain_model, plain) = trained(kind), trained("plain")
    assert isinstance(zero.optimizer, ZeroRedundancyOptimizer)
    assert all(map(torch.equal, model.parameters(), plain_model.parameters()))
    mine, theirs = zero.state_dict(), plain.state_dict()
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    assert mine["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert all(torch.equal(mine["state"][number][key], value) for key, value in state.items())
    assert zero.defaults == plain.defaults


@pytest.mark.parametrize(("first", "then"), [("AdamW", "plain"), ("plain", "AdamW"), ("AdamW", "AdamW")])
def test_states_of_zero_and_plain_optimizer_are_compatible(first, then):
    whole, _ = trained("plain", steps=5)
    model, optim = trained(first, steps=2)
    continued, _ = trained(then, 3, optim.state_dict(), model)
    assert all(map(torch.equal, continued.parameters(), whole.parameters()))


def test_parameters_sharded_by_fsdp_raise_an_error():
    class Sharded(nn.Parameter):
        device_mesh = None

    with pytest.raises(ConfigError, match="FSDP already shards the optimizer state; use 'AdamW' instead"):
        ZeroRedundancyOptimizer([Sharded(torch.ones(2))], "AdamW", lr=0.1)
