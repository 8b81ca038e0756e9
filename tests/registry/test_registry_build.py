"""Tests of building objects from configuration dicts, and of the configuration paths in errors."""

import copy

import pytest
import torch
from torch import nn

from slipstream.config import ConfigDict
from slipstream.errors import BuildError, ConfigError, DataError
from slipstream.registry import MODELS, OPTIM_WRAPPERS, TRANSFORMS, Registry, build_from_cfg

PARTS = Registry("part", scope="slipstream")
SGD = torch.optim.SGD([torch.zeros(1)])


@PARTS.register_module()
class Point:
    def __init__(self, x, y=0, *, scale=1):
        self.values = x, y, scale


@PARTS.register_module()
def sum_of(a, b):
    return a + b


@PARTS.register_module()
class Open:
    def __init__(self, a=0, **kwargs):
        self.values = {"a": a, **kwargs}


@PARTS.register_module()
class Chain:
    """A class that builds its children, like a dataset with a pipeline."""

    def __init__(self, first=None, steps=()):
        self.first = PARTS.build(first) if first else None
        self.steps = [PARTS.build(step) for step in steps]


@PARTS.register_module()
class Refuses:
    def __init__(self, error):
        raise error


@pytest.mark.parametrize("kind", ["Point", Point, "slipstream.Point", "mmengine.Point"])
def test_type_can_be_a_name_or_a_class(kind):
    assert PARTS.build({"type": kind, "x": 1, "scale": 3}).values == (1, 0, 3)


@pytest.mark.parametrize("kind", ["sum_of", sum_of])
def test_type_can_be_a_function(kind):
    assert build_from_cfg({"type": kind, "a": 1, "b": 2}, PARTS) == 3


def test_default_args_are_overridden_and_can_contain_the_type():
    defaults = {"type": "Point", "x": 1, "y": 2}
    assert PARTS.build({"y": 5}, default_args=defaults).values == (1, 5, 1)
    assert PARTS.build({"type": "Open", "y": 5}, default_args=defaults).values == {"a": 0, "x": 1, "y": 5}
    assert defaults == {"type": "Point", "x": 1, "y": 2}


def test_configuration_is_not_modified():
    cfg = {"type": "Chain", "first": {"type": "Point", "x": [1]}, "steps": [{"type": "Open", "a": {"b": 1}}]}
    before = copy.deepcopy(cfg)
    PARTS.build(cfg, default_args={"steps": ()})
    PARTS.build(cfg)
    assert cfg == before


def test_config_dict_builds_like_a_dict():
    cfg = ConfigDict(type="Chain", steps=[dict(type="Point", x=1)])
    assert PARTS.build(cfg).steps[0].values == (1, 0, 1)
    assert cfg.type == "Chain"


# ---- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"type": "Point", "x": 1, "scael": 2}, "Point has no parameter 'scael'; did you mean 'scale'?"),
        ({"type": "Point", "x": 1, "zebra": 2}, "Point has no parameter 'zebra'"),
        ({"type": "Point"}, "Point: Point.__init__() missing 1 required positional argument: 'x'"),
        ({"x": 1}, "a part needs a 'type'; got the keys ['x']"),
        ("Point", "a part must be configured with a dict that has a 'type', not 'Point'"),
        (None, "a part must be configured with a dict that has a 'type', not None"),
        ({"type": "Refuses", "error": ValueError("too small")}, "Refuses: too small"),
        ({"type": "Pointt"}, "'Pointt' is not a registered part; did you mean 'Point'?"),
    ],
)
def test_errors_name_the_mistake_and_the_remedy(cfg, message):
    with pytest.raises(ConfigError) as caught:
        PARTS.build(cfg)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ({"first": {"type": "Nope"}}, "first: 'Nope'"),
        ({"steps": [{"type": "Point", "x": 0}, {"type": "Open"}, {"type": "Nope"}]}, "steps[2]: 'Nope'"),
        (
            {"first": {"type": "Chain", "steps": [{"type": "Chain", "first": {"type": "Nope"}}]}},
            "first.steps[0].first: 'Nope'",
        ),
        ({"first": {"type": "Point", "xx": 0}}, "first: Point has no parameter 'xx'"),
        ({"steps": [{"type": "Refuses", "error": TypeError("odd")}]}, "steps[0]: Refuses: odd"),
        (
            {"first": {"type": "Refuses", "error": RuntimeError("negative dimension")}},
            "first: Refuses: RuntimeError: negative dimension",
        ),
        ({"first": {"type": "Refuses", "error": KeyError("k")}}, "first: Refuses: KeyError: 'k'"),
        ({"first": {"type": "Point", 3: 1}}, "first: parameter names must be strings, not 3"),
        ({"steps": [{"x": 1}]}, "steps[0]: a part needs a 'type'"),
        (
            {"first": {"type": "Refuses", "error": ConfigError("must be even", "size[1]")}},
            "first.size[1]: must be even",
        ),
    ],
)
def test_nested_error_contains_its_config_path(bad, place):
    with pytest.raises(ConfigError) as caught:
        PARTS.build({"type": "Chain", **bad})
    assert str(caught.value).startswith(place)


def test_build_error_keeps_its_cause():
    cause = ValueError("too small")
    with pytest.raises(BuildError) as caught:
        PARTS.build({"type": "Chain", "first": {"type": "Refuses", "error": cause}})
    assert caught.value.__cause__ is cause


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [DataError("no files"), FileNotFoundError("train.csv"), ImportError("cv2"), OutOfMemoryError("8 GiB")],
)
def test_other_constructor_errors_are_raised_unchanged(error):
    with pytest.raises(type(error)) as caught:
        PARTS.build({"type": "Chain", "steps": [{"type": "Refuses", "error": error}]})
    assert caught.value is error


@pytest.mark.parametrize(
    ("registry", "cfg", "place"),
    [
        (TRANSFORMS, {"type": "SegRandomFlip", "prob": "often"}, "prob"),
        (MODELS, {"type": "ExponentialMovingAverage", "model": nn.Linear(1, 1), "momentum": "x"}, "momentum"),
        (
            OPTIM_WRAPPERS,
            {"type": "OptimWrapper", "optimizer": SGD, "accumulative_counts": True},
            "accumulative_counts",
        ),
    ],
)
def test_wrong_argument_types_raise_errors_for_classes_of_this_package(registry, cfg, place):
    with pytest.raises(BuildError, match=rf"^{place}: must be .*, not "):
        registry.build(cfg)
    with pytest.raises(BuildError, match=rf"^steps\[0\].{place}: must be "):
        PARTS.build({"type": "Chain", "steps": [{**cfg, "type": registry.get(cfg["type"])}]})


def test_annotations_of_other_packages_are_not_checked():
    # torch annotates `p` as float. Inexact annotations must not cause errors.
    layer = MODELS.build({"type": "Dropout", "p": 0})
    assert layer.p == 0

    class External:
        def __init__(self, count: int):
            self.count = count

    assert MODELS.build({"type": External, "count": "many"}).count == "many"


# ---- models ------------------------------------------------------------------------------------------


def test_list_of_models_is_built_as_a_sequential():
    net = MODELS.build([{"type": "Linear", "in_features": 2, "out_features": 3}, {"type": "ReLU"}])
    assert type(net) is nn.Sequential
    assert isinstance(net[0], nn.Linear)
    assert net(torch.ones(1, 2)).shape == (1, 3)


def test_children_inherit_the_build_function():
    library = Registry("model", parent=MODELS, scope="lib_of_this_test")
    try:
        assert isinstance(library.build([{"type": "ReLU"}]), nn.Sequential)
    finally:
        del MODELS.children["lib_of_this_test"]


CONV = {"type": "Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 1}
