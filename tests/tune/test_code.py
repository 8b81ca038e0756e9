"""Test that the cache key changes if a change can affect the training step, and otherwise stays the same."""

import enum
import functools
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.tune.cache import cache_file, describe_config, describe_objects
from slipstream.tune.code import UndescribedError, describe_callable, describe_model, digest

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


def test_equal_models_have_equal_keys_regardless_of_weights_and_mode():
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


class Recursive(nn.Module):
    """A model with a reference cycle."""

    def __init__(self, how):
        super().__init__()
        self.child = nn.Linear(2, 2)
        if how == "hook":
            self.child.register_forward_hook(self.keep)
        elif how == "method":
            self.run = self.keep
        elif how == "list":
            self.child.parent = [self]
        else:
            self.table = {}
            self.table["self"] = self.table

    def keep(self, module, args, output):
        self.last = output


@pytest.mark.parametrize("how", ["hook", "method", "list", "dict"])
def test_a_model_that_refers_to_itself_has_a_key(how):
    other = Recursive(how)
    assert key(Recursive(how)) == key(other)
    other.child.added = 1
    assert key(Recursive(how)) != key(other)


@dataclass
class Size:
    depth: int


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


class Pair:
    """An object without a `__dict__`."""

    __slots__ = ("left",)

    def __init__(self, left):
        self.left = left


class Holder(nn.Module):
    """A module with one attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value


@pytest.mark.parametrize(
    "make",
    [
        Size,
        Pair,
        range,
        np.int64,
        torch.zeros,
        np.zeros,
        Mode,
        lambda n: SimpleNamespace(depth=n),
        lambda n: {Mode(n): [Size(n)]},
        lambda n: [torch.float32, torch.float64][n - 1],
        lambda n: Size(Size(n)).__eq__,
    ],
)
def test_a_changed_attribute_of_any_readable_class_changes_the_key(make):
    assert key(Holder(make(1))) == key(Holder(make(1)))
    assert key(Holder(make(1))) != key(Holder(make(2)))


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), iter([1]), ModuleType("own"), {object()}, list(range(200_000))],
    ids=["lock", "iterator", "module", "set", "data"],
)
def test_a_value_that_cannot_be_described_raises_an_error(value):
    with pytest.raises(UndescribedError):
        describe_model(Holder([value]))


DEPTHS, OPTIONS, SETTINGS = [1], {"depth": (1,)}, SimpleNamespace(depth=1)
library = ModuleType("library")
exec("def inner(x): return x\ndef outer(x): return inner(x)\nscale = 1", vars(library))


class Reader(nn.Module):
    """A module that uses global variables, a function of another module, and class attributes."""

    kind = nn.ReLU
    blocks = {"count": 1}  # noqa: RUF012

    def forward(self, x):
        depth = DEPTHS[0] * OPTIONS["depth"][0] * SETTINGS.depth
        return [library.outer(self.kind()(x)) * library.scale for _ in range(depth)]


def test_globals_modules_and_class_attributes_that_a_method_reads_change_the_key(monkeypatch):
    keys = [key(Reader())]
    for target, name, value in [
        (DEPTHS, 0, 2),
        (OPTIONS, "depth", (2,)),
        (vars(SETTINGS), "depth", 2),
        (vars(library), "scale", 2),
        (vars(library), "inner", helper),
        (Reader.blocks, "count", 2),
    ]:
        if isinstance(target, dict):
            monkeypatch.setitem(target, name, value)
        else:
            monkeypatch.setitem(globals(), "DEPTHS", [value])
        keys.append(key(Reader()))
    monkeypatch.setattr(Reader, "kind", nn.Softmax)
    keys.append(key(Reader()))
    assert keys[-1] == key(Reader())
    assert len(set(keys)) == len(keys)


def test_the_code_of_a_module_that_a_function_imports_is_part_of_the_key(monkeypatch):
    def loss(x):
        from library import outer

        return outer(x)

    with pytest.raises(UndescribedError, match="library, which is not loaded yet"):
        describe_callable(loss)
    monkeypatch.setitem(sys.modules, "library", library)
    before = digest(describe_callable(loss))
    monkeypatch.setattr(library, "outer", helper)
    assert digest(describe_callable(loss)) != before


def repeated(count):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return [function(*args) for _ in range(count)]

        return wrapper

    return decorate


def once(function):
    return functools.wraps(function)(lambda *args: function(*args))


@pytest.mark.parametrize("function", [helper, F.relu])
def test_decorators_and_their_settings_change_the_key(function):
    def described(decorate):
        return digest(describe_callable(type("Decorated", (nn.Module,), {"forward": decorate(function)})))

    assert described(repeated(1)) == described(repeated(1))
    assert len({described(each) for each in (repeated(1), repeated(2), once, lambda each: each)}) == 4


def test_closure_variables_of_the_loss_change_the_key():
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
