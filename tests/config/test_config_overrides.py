"""Tests of overrides: parsing, merging and validation."""

import argparse
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import Config, DictAction, parse_override
from slipstream.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-7", -7),
        ("1e-3", 1e-3),
        ("1.5", 1.5),
        ("true", True),
        ("True", True),
        ("False", False),
        ("none", None),
        ("None", None),
        ("null", None),
        ("~", None),
        ("", ""),
        ("abc", "abc"),
        ("'1'", "1"),
        ('"none"', "none"),
        ("'it''s'", "it's"),
        (r'"a\tb"', "a\tb"),
        ("'C:\\new'", "C:\\new"),
        ("[1,2]", [1, 2]),
        ("[]", []),
        ("()", ()),
        ("{}", {}),
        ("(1, 2)", (1, 2)),
        ("(1,)", (1,)),
        ("(1)", (1,)),
        ("[1, 2,]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("{a: {b: [x, (1e-3, null)]}, 'c d': ''}", {"a": {"b": ["x", (1e-3, None)]}, "c d": ""}),
        ("{url: http://host:80/x}", {"url": "http://host:80/x"}),
        ("[a b, ' c ']", ["a b", " c "]),
        ("[[1, 2], [3]]", [[1, 2], [3]]),
        ("1,2,3", [1, 2, 3]),
        ("(1,2),(3,4)", [(1, 2), (3, 4)]),
        ("a=b", "a=b"),
        ("path/to/x.pth", "path/to/x.pth"),
        ("Resize(1,2)", "Resize(1,2)"),
        ("*", "*"),
        ("&x", "&x"),
        ("#fff", "#fff"),
        ("<<", "<<"),
        ("!!python/object:os.system", "!!python/object:os.system"),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("12:30", "12:30"),
    ],
)
def test_values_are_parsed_with_their_types(text, value):
    key, found = parse_override(f"a.b={text}")
    assert key == "a.b"
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["[1", "[1, 2", "{a: 1", "{a}", "(1]", "'x", "'x' y", "[,]", "[f(x)]", r'"\q"', "{a: }"]
)
def test_unreadable_value_error_names_the_key(text):
    with pytest.raises(ConfigError, match=r"^a\.b: cannot parse .*put quotes"):
        parse_override(f"a.b={text}")


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1", "a.=1", ""])
def test_override_without_a_key_raises_an_error(text):
    with pytest.raises(ConfigError, match="an override must be key=value"):
        parse_override(text)


@given(st.text())
def test_any_text_is_parsed_or_raises_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_override(f"a={text}")[0] == "a"


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def flow(value):
    """Return `value` in the syntax of overrides: YAML flow style with tuples."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(flow, value)) + "]"
    if isinstance(value, tuple):
        return "( " + " , ".join(map(flow, value)) + " )"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    return str(value)


@given(trees)
def test_flow_values_round_trip(value):
    assert parse_override(f"a={flow(value)}") == ("a", value)


@pytest.fixture
def cfg():
    return Config(
        {
            "train_cfg": {"by_epoch": True, "max_epochs": 10},
            "optim_wrapper": {
                "type": "OptimWrapper",
                "optimizer": {"type": "SGD", "lr": 0.1},
                "clip_grad": None,
            },
            "pipeline": [{"type": "Load"}, {"type": "Flip", "prob": 0.5}],
            "sizes": (1, 2),
            "env": {},
            "plain": {"a": {"b": 1}},
        },
        filename="configs/x.py",
    )


def test_merge_from_dict_sets_nested_keys_and_list_items(cfg):
    cfg.merge_from_dict(
        {
            "optim_wrapper.optimizer.lr": 1.0,
            "pipeline.1.prob": 0.9,
            "pipeline.0": {"to": "rgb"},
            "sizes.0": 5,
            "new.deep.key": 1,
            "optim_wrapper.clip_grad.max_norm": 3,
        }
    )
    assert cfg.optim_wrapper.optimizer == {"type": "SGD", "lr": 1.0}
    assert cfg.pipeline == [{"type": "Load", "to": "rgb"}, {"type": "Flip", "prob": 0.9}]
    assert cfg.sizes == (5, 2)
    assert cfg.new.deep.key == 1
    assert cfg.optim_wrapper.clip_grad == {"max_norm": 3}


def test_merge_from_dict_deletes_before_it_sets(cfg):
    cfg.merge_from_dict({"optim_wrapper.type": "Amp", "optim_wrapper._delete_": True})
    assert cfg.optim_wrapper == {"type": "Amp"}
    cfg.merge_from_dict({"train_cfg": {"_delete_": True, "max_iters": 3}})
    assert cfg.train_cfg == {"max_iters": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline.2.type": 1}, r"^pipeline: the list has no item '2'; its length is 2"),
        ({"pipeline.x": 1}, r"^pipeline: the list has no item 'x'; its length is 2"),
        ({"plain.a.b.c": 1}, r"^plain\.a\.b: a dict cannot be merged into 1"),
        ({"train_cfg.max_epochs": 3, "sizes.7": 1}, r"^sizes: the list has no item '7'"),
    ],
)
def test_failed_merge_does_not_change_the_configuration(cfg, options, message):
    before = cfg.to_dict()
    with pytest.raises(ConfigError, match=message):
        cfg.merge_from_dict(options)
    assert cfg.to_dict() == before


@pytest.mark.parametrize(
    "text",
    [
        "train_cfg.max_epochs=3",
        "optim_wrapper.accumulative_counts=4",
        "optim_wrapper.optimizer.momentum=0.9",
        "optim_wrapper.clip_grad.max_norm=1",
        "pipeline.1.direction=x",
        "env.anything.at=1",
        "resume=true",
        "speed.compile.scope=step",
        "plain.a.b=2",
        "plain.a._delete_=true",
        "sizes.1=3",
    ],
)
def test_override_accepts_existing_keys_and_keys_checked_by_a_builder(cfg, text):
    cfg.override([text], known=["resume", "speed"])
    key, value = parse_override(text)
    node = cfg
    for part in key.split("."):
        if part == "_delete_":
            return
        node = node[int(part) if isinstance(node, list | tuple) else part]
    assert node == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_epochs=3", r"^max_epochs: no such key in configs/x\.py; did you mean 'train_cfg\.max_epochs'"),
        ("lr=3", r"^lr: .*'optim_wrapper\.optimizer\.lr'"),
        ("optimizer.lr=3", r"^optimizer\.lr: .*'optim_wrapper\.optimizer\.lr'"),
        ("train_cfg.max_epoch=3", r"^train_cfg\.max_epoch: .*'train_cfg' of .*'train_cfg\.max_epochs'"),
        ("resum=true", r"^resum: .*'resume'"),
        ("plain.a.c=1", r"^plain\.a\.c: .*'plain\.a' of .*'plain\.a\.b'"),
        ("plain.x.y=1", r"^plain\.x\.y: "),
        (
            "pipeline.2.type=x",
            r"^pipeline\.2\.type: the list 'pipeline' in .* has no item '2'; its length is 2",
        ),
    ],
)
def test_override_error_names_the_nearest_key(cfg, text, message):
    before = cfg.to_dict()
    with pytest.raises(UnknownNameError, match=message):
        cfg.override(["sizes.0=9", text], known=["resume"])
    assert cfg.to_dict() == before


def test_dict_action_collects_typed_values():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    args = parser.parse_args(["--cfg-options", "a.b=1", "c=(1,2)", "--cfg-options", "d=x,y", "a.b=2"])
    assert args.cfg_options == {"a.b": 2, "c": (1, 2), "d": ["x", "y"]}
    assert parser.parse_args([]).cfg_options is None


VARIABLES = """classes = ["a", "b"]
rate, size = 0.1, 8
crop = [64, size]
unused = 1
steps = [dict(type="Crop", size=crop), dict(type="Flip", prob=rate / 2)]
model = dict(type="Net", classes=len(classes), sizes=[1, size])
work_dir = "out"
log = work_dir + "/log"
"""


@pytest.mark.parametrize("text", ["crop=[96,96]", "crop.0=96", "rate=0.2", "size=4", "classes=[a]"])
def test_override_of_a_variable_that_other_values_use_raises_an_error(tmp_path, text):
    (tmp_path / "base.py").write_text(VARIABLES)
    child = tmp_path / "child.py"
    child.write_text('_base_ = "base.py"\nval = dict(classes=_base_.classes)\n')
    with pytest.raises(ConfigError, match=r"this is a variable of .*child.py"):
        Config.fromfile(child).override([text], known=["model", "work_dir"])


def test_override_accepts_known_keys_and_unused_variables_of_a_python_file(tmp_path):
    (tmp_path / "c.py").write_text(VARIABLES)
    cfg = Config.fromfile(tmp_path / "c.py")
    cfg.override(["work_dir=elsewhere", "unused=2", "model.sizes.1=3"], known=["model", "work_dir"])
    assert (cfg.work_dir, cfg.unused, cfg.model.sizes) == ("elsewhere", 2, [1, 3])


def test_override_accepts_a_known_key_that_its_section_lacks(cfg):
    cfg.override(["train_cfg.val_interval=4"], known=["train_cfg.val_interval"])
    assert cfg.train_cfg.val_interval == 4
    with pytest.raises(UnknownNameError, match=r"did you mean 'train_cfg\.val_interval'"):
        cfg.override(["train_cfg.val_intervall=4"], known=["train_cfg.val_interval"])
