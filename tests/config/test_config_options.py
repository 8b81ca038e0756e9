"""Tests of `options`, which builds a dataclass instance from a dict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from slipstream.config import ConfigDict, options
from slipstream.errors import ConfigError, UnknownNameError


@dataclass(frozen=True)
class Ema:
    decay: float = 0.999
    type: Literal["exp", "constant"] = "exp"

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie in [0, 1], not {self.decay}")


@dataclass(frozen=True)
class Speed:
    accumulate: int | None = None
    sync_bn: bool = False
    ema: Ema | bool | None = None
    inner: Ema = field(default_factory=Ema)
    blocks: list[str] = field(default_factory=list)
    several: list[Ema] = field(default_factory=list)


@dataclass(frozen=True)
class Required:
    name: str


def test_values_become_fields():
    made = options(Speed, ConfigDict(accumulate=4, blocks=("a",), ema={"decay": 1}), "speed")
    assert made == Speed(accumulate=4, blocks=("a",), ema=Ema(decay=1))


def test_instances_are_returned_unchanged_and_none_returns_the_defaults():
    made = Speed(accumulate=2)
    assert options(Speed, made, "speed") is made
    assert options(Speed, None, "speed") == Speed()
    assert options(Speed, {"inner": None}, "speed").inner == Ema()
    assert options(Speed, {"ema": None}, "speed").ema is None
    assert options(Speed, {"ema": True}, "speed").ema is True
    assert options(Speed, {"ema": Ema(0.5)}, "speed").ema == Ema(0.5)
    assert options(Speed, {"several": [Ema()]}, "speed").several == [Ema()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accumulate": "abc"}, r"^speed\.accumulate: must be an int or None, not 'abc'$"),
        ({"accumulate": True}, r"^speed\.accumulate: must be an int or None, not True$"),
        ({"sync_bn": "off"}, r"^speed\.sync_bn: must be a bool, not 'off'$"),
        ({"ema": "abc"}, r"^speed\.ema: must be an Ema or bool or None, not 'abc'$"),
        ({"ema": {"type": "linear"}}, r"^speed\.ema\.type: must be 'exp' or 'constant', not 'linear'$"),
        ({"ema": {"decay": 2}}, r"^speed\.ema: decay must lie in \[0, 1\], not 2$"),
        ({"inner": 3}, r"^speed\.inner: must be an Ema, not 3$"),
        ({"several": {"decay": 1}}, r"^speed\.several: must be a list"),
        ([1], r"^speed: must be a dict with the fields of Speed, not \[1\]$"),
    ],
)
def test_wrong_value_error_names_path_type_and_value(values, message):
    with pytest.raises(ConfigError, match=message):
        options(Speed, values, "speed")


def test_unknown_key_error_names_path_and_nearest_key():
    with pytest.raises(
        UnknownNameError, match=r"^speed\.acumulate: no such option; did you mean 'accumulate'\?$"
    ):
        options(Speed, {"acumulate": 1}, "speed")
    with pytest.raises(ConfigError, match=r"^speed\.ema\.deacy: .*'decay'"):
        options(Speed, {"ema": {"deacy": 1}}, "speed")


def test_missing_field_error_names_the_field():
    with pytest.raises(
        ConfigError, match=r"^part\.name: the required key is missing; its value must be a str$"
    ):
        options(Required, {}, "part")
    assert options(Required, {"name": "x"}, "") == Required("x")
    with pytest.raises(ConfigError, match=r"^name: must be a str, not 3$"):
        options(Required, {"name": 3}, "")
