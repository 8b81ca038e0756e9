"""The key of the cache: what changes a training step changes it, and nothing else does."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.tune.cache import cache_file, describe_config, describe_objects
from slipstream.tune.code import describe_callable, describe_model, digest

SCALE = 2.0


def helper(x):
    return SCALE * x


class Block(nn.Module):
    """A submodule whose `repr` does not contain its settings."""

    def __init__(self, act=F.relu, groups=1, flag=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.act, self.groups, self.flag, self.sizes = act, groups, flag, [1, (2, "a")]

    def forward(self, x):
        return helper(self.act(x * self.weight))


def model(**settings):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(**settings)))


def key(changed):
    return digest(describe_model(changed))


def test_equal_models_have_equal_keys_whatever_their_weights_and_mode_are():
    other = model()
    nn.init.zeros_(other[0].weight)
    assert key(model()) == key(other.eval())


def freeze(net):
    net[0].weight.requires_grad_(False)


def narrow(net):
    net[1][0].weight.data = torch.ones(4, dtype=torch.bfloat16)


def buffer(net):
    net[1][0].count = torch.zeros(2)


def tie(net):
    net[0].bias = net[1][0].weight


def attribute(net):
    net[1][0].groups = 2


def switch(net):
    net[1][0].flag = True


def activation(net):
    net[1][0].act = F.gelu


def nested(net):
    net[1][0].sizes = [1, (2, "b")]


def hook(net):
    net[1][0].register_forward_hook(lambda module, args, output: output + 1)


def layout(net):
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    "change", [freeze, narrow, buffer, tie, attribute, switch, activation, nested, hook, layout]
)
def test_a_changed_model_has_a_new_key(change):
    net = model()
    change(net)
    assert key(net) != key(model())


def test_a_changed_method_of_a_submodule_changes_the_key(monkeypatch):
    before = key(model())
    monkeypatch.setattr(Block, "forward", lambda self, x: self.act(x + self.weight))
    assert key(model()) != before


def test_a_changed_function_or_constant_that_a_submodule_uses_changes_the_key(monkeypatch):
    keys = {key(model())}
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    keys.add(key(model()))
    monkeypatch.setitem(globals(), "helper", lambda x: x + 1)
    keys.add(key(model()))
    assert len(keys) == 3


def test_a_closure_of_the_loss_changes_the_key():
    def weighted(weight):
        return lambda outputs, targets: weight * F.cross_entropy(outputs, targets)

    assert digest(describe_callable(weighted(1.0))) == digest(describe_callable(weighted(1.0)))
    assert digest(describe_callable(weighted(1.0))) != digest(describe_callable(weighted(2.0)))


def test_the_frozen_parameters_of_a_group_change_the_key_of_the_objects():
    def described(count):
        net = model()
        optimizer = torch.optim.SGD(list(net.parameters())[:count], lr=0.1)
        return digest(describe_objects(net, [], optimizer, F.mse_loss))

    assert described(3) == described(3)
    assert described(3) != described(2)


def test_a_configuration_contains_the_code_of_its_classes(monkeypatch):
    def file():
        cfg = dict(model=dict(type=Block), train_dataloader=dict(batch_size=2))
        return cache_file(describe_config(cfg), ["fused"], 60.0)

    before = file()
    assert file() == before
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert file() != before


def test_the_key_is_the_same_in_another_process(tmp_path):
    script = textwrap.dedent("""
        import test_code
        from slipstream.registry import MODELS
        from slipstream.tune.cache import describe_config
        from slipstream.tune.code import describe_callable, digest
        cfg = {"model": {"type": "pp_lite_t_seg"}}
        parts = [describe_config(cfg), describe_callable(test_code.Block)]
        print(test_code.key(test_code.model()), digest(parts))
    """)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in (1, 2)
    }
    assert len(outputs) == 1
