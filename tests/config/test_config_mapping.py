"""Tests of `Config` and `ConfigDict` as mappings."""

import copy
import pickle

import pytest

from slipstream.config import Config, ConfigDict
from slipstream.errors import ConfigError


@pytest.fixture
def cfg():
    return Config(
        {"model": {"type": "Net", "stages": [{"depth": 2}, ({"depth": 3},)]}, "lr": 0.1}, filename="x.py"
    )


def test_dicts_at_every_level_have_attributes(cfg):
    assert cfg.model.stages[0].depth == 2
    assert cfg.model.stages[1][0].depth == 3
    assert type(cfg.model.stages[1]) is tuple
    assert cfg["model"]["type"] == cfg.model.type == "Net"


def test_attributes_and_items_can_be_assigned_and_deleted(cfg):
    cfg.model.head = {"classes": [{"name": "road"}]}
    cfg["model"]["stages"][0]["depth"] = 7
    cfg.seed = 3
    del cfg.lr
    del cfg.model.type
    assert cfg.model.head.classes[0].name == "road"
    assert cfg.to_dict() == {
        "model": {"stages": [{"depth": 7}, ({"depth": 3},)], "head": {"classes": [{"name": "road"}]}},
        "seed": 3,
    }


def test_mapping_methods_match_those_of_dict(cfg):
    assert list(cfg) == list(cfg.keys()) == ["model", "lr"]
    assert len(cfg) == 2
    assert "lr" in cfg
    assert "nope" not in cfg
    assert dict(cfg.items())["lr"] == 0.1
    assert cfg.get("nope", 5) == 5
    assert cfg.pop("lr") == 0.1
    assert cfg.pop("lr", None) is None
    cfg.setdefault("env", {"a": 1}).a = 2
    assert cfg.env.a == 2
    cfg.update({"x": {"y": 1}})
    assert cfg.x.y == 1
    with pytest.raises(KeyError):
        cfg["nope"]


def test_missing_attribute_error_names_the_nearest_key(cfg):
    with pytest.raises(AttributeError, match="'modle'; did you mean 'model'"):
        _ = cfg.modle
    with pytest.raises(AttributeError, match="'stage'; did you mean 'stages'"):
        _ = cfg.model.stage
    with pytest.raises(AttributeError, match="no key 'gone'"):
        del cfg.model.gone
    assert getattr(cfg, "nope", None) is None
    assert not hasattr(cfg, "nope")


def test_to_dict_returns_new_plain_containers(cfg):
    plain = cfg.to_dict()
    assert type(plain["model"]) is dict
    assert type(plain["model"]["stages"][1][0]) is dict
    plain["model"]["stages"][0]["depth"] = 99
    assert cfg.model.stages[0].depth == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_deep_copies_are_equal_and_independent(cfg, clone):
    twin = clone(cfg)
    assert twin == cfg
    assert twin.filename == "x.py"
    assert type(twin.model) is ConfigDict
    assert type(twin.model.stages[0]) is ConfigDict
    twin.model.stages[0].depth = 9
    assert cfg.model.stages[0].depth == 2


@pytest.mark.parametrize("clone", [copy.copy, lambda c: c.copy()])
def test_shallow_copy_has_its_own_top_level(cfg, clone):
    twin = clone(cfg)
    twin.seed = 1
    assert "seed" not in cfg
    twin.model.type = "Other"
    assert cfg.model.type == "Other"
    inner = clone(cfg.model)
    assert type(inner) is ConfigDict
    inner.type = "Third"
    assert cfg.model.type == "Other"


def test_config_dict_operators_and_setdefault_keep_the_type():
    d = ConfigDict(a=1) | {"b": {"c": 2}}
    assert d.b.c == 2
    d |= {"e": [{"f": 3}]}
    assert d.e[0].f == 3
    assert d.setdefault("g", {"h": 1}).h == 1
    assert ConfigDict([("x", {"y": 1})], z={"w": 2}).z.w == 2


@pytest.mark.parametrize("key", ["filename", "text", "pretty_text", "env_variables", "_base_", "__name__"])
def test_reserved_names_raise_errors(key):
    with pytest.raises(ConfigError, match=f"{key}: this name is reserved"):
        Config({key: 1})
    cfg = Config()
    with pytest.raises(ConfigError, match="reserved"):
        cfg[key] = 1
    with pytest.raises(ConfigError, match="reserved"):
        setattr(cfg, key, 1)
    with pytest.raises(ConfigError, match="reserved"):
        cfg.merge_from_dict({key: 1})
    assert Config({"a": {key: 1}}).a[key] == 1
