"""Tests of loading configuration files: formats, bases, placeholders and errors."""

import os
import sys

import pytest

from slipstream.config import Config, ConfigDict
from slipstream.errors import ConfigError, UnknownNameError


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


SAME = {
    "a.py": "lr = 1e-3\nmodel = dict(type='Net', depths=[2, 3], head=None, deep=True)\n",
    "a.yaml": "lr: 1e-3\nmodel: {type: Net, depths: [2, 3], head: null, deep: true}\n",
    "a.yml": "lr: 1.0e-3\nmodel:\n  type: Net\n  depths: [2, 3]\n  head: ~\n  deep: True\n",
    "a.json": '{"lr": 1e-3, "model": {"type": "Net", "depths": [2, 3], "head": null, "deep": true}}',
}


@pytest.mark.parametrize("name", SAME)
def test_all_formats_load_the_same_configuration(write, name):
    cfg = Config.fromfile(write(name, SAME[name]))
    assert cfg.to_dict() == {
        "lr": 1e-3,
        "model": {"type": "Net", "depths": [2, 3], "head": None, "deep": True},
    }
    assert type(cfg.model) is ConfigDict
    assert cfg.filename.endswith(name)
    assert SAME[name] in cfg.text


def test_toml_is_loaded(write):
    cfg = Config.fromfile(write("a.toml", "lr = 1e-3\n[model]\ntype = 'Net'\ndepths = [2, 3]\n"))
    assert cfg.to_dict() == {"lr": 1e-3, "model": {"type": "Net", "depths": [2, 3]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        (".inf", float("inf")),
        ("0x1f", 31),
        ("1_000", 1000),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("017", "017"),
        ("=", "="),
        ("none", "none"),
        ("1e-3s", "1e-3s"),
        ("e3", "e3"),
        ("off", False),
    ],
)
def test_yaml_scalars_have_the_correct_types(text, value):
    found = Config.fromstring(f"a: {text}", ".yaml").a
    assert found == value
    assert type(found) is type(value)


def test_python_files_keep_values_and_drop_code(write):
    text = (
        "from __future__ import annotations\nimport os\nfrom math import sqrt\nfrom pathlib import Path\n"
        "def f(): return 2\nclass A: pass\ng = lambda: 3\n__version__ = '1'\n"
        "a = f() * 2\nroot = sqrt(4)\nsteps = tuple(range(3))\n_half = .5\n"
        "kind: int = 3\n"
    )
    cfg = Config.fromfile(write("a.py", text))
    assert cfg.to_dict() == {"a": 4, "root": 2.0, "steps": (0, 1, 2), "_half": 0.5, "kind": 3}


def test_annotations_in_python_files_are_evaluated(write):
    with pytest.raises(ConfigError, match=r"a\.py:1: NameError"):
        Config.fromfile(write("a.py", "kind: NoSuchName = 3\n"))


def test_child_merges_over_bases_of_any_format(write):
    write("base/model.yaml", "model: {type: Net, width: 8, head: {classes: 19}}\n")
    write("base/schedule.json", '{"optimizer": {"type": "SGD", "lr": 0.1}}')
    write("base/runtime.toml", "seed = 1\n")
    child = write(
        "exp/a.py",
        "_base_ = ['../base/model.yaml', '../base/schedule.json', '../base/runtime.toml']\n"
        "model = dict(width=16, head=dict(dropout=.1))\n"
        "optimizer = dict(_delete_=True, type='Adam')\n",
    )
    assert Config.fromfile(child).to_dict() == {
        "model": {"type": "Net", "width": 16, "head": {"classes": 19, "dropout": 0.1}},
        "optimizer": {"type": "Adam"},
        "seed": 1,
    }


def test_delete_key_is_removed_at_every_level(write):
    cfg = Config.fromfile(write("a.yaml", "a: {_delete_: true, b: [{_delete_: false, c: 1}]}\n"))
    assert cfg.to_dict() == {"a": {"b": [{"c": 1}]}}


def test_text_contains_every_file_with_bases_first(write):
    write("base.yaml", "a: 1 # base\n")
    cfg = Config.fromfile(write("child.yaml", "_base_: base.yaml\nb: 2 # child\n"))
    assert cfg.text.index("# base") < cfg.text.index("# child")
    assert "base.yaml" in cfg.text


def test_base_values_can_be_used_in_python_expressions(write):
    write("root.yaml", "lr: 0.1\nmodel: {backbone: {depth: 50}, names: [a, b]}\n")
    write("base.py", "_base_ = 'root.yaml'\nepochs = 10\n")
    cfg = Config.fromfile(
        write(
            "child.py",
            "_base_ = ['./base.py']\na = _base_.model.backbone\nb = dict(x=_base_.lr * 2)\n"
            "c = [_base_.epochs + i for i in range(2)]\nd = len(_base_.model.names)\na.depth = 18\n",
        )
    )
    assert cfg.a == {"depth": 18}
    assert cfg.model.backbone.depth == 50
    assert cfg.b == {"x": 0.2}
    assert cfg.c == [10, 11]
    assert cfg.d == 2
    assert "_base_" not in cfg


def test_unknown_base_value_error_names_the_line_and_the_nearest_key(write):
    write("base.py", "model = dict(backbone=1)\n")
    with pytest.raises(ConfigError, match=r"child\.py:2: AttributeError.*'backbon'.*'backbone'"):
        Config.fromfile(write("child.py", "_base_ = 'base.py'\na = _base_.model.backbon\n"))
    with pytest.raises(UnknownNameError, match=r"child\.json:3: no base has.*'model.backbone'"):
        Config.fromfile(
            write("child.json", '{\n"_base_": "base.py",\n"a": {{ _base_.model.backbon }}}'), trust=True
        )


FORMATS_WITH_PLACEHOLDERS = {
    "c.py": (
        "_base_ = 'base.json'\nname = '{{ fileBasenameNoExtension }}'\nfull = '{{fileBasename}}'\n"
        "out = '{{ fileDirname }}/runs'\next = '{{ fileExtname }}'\ncopied = {{ _base_.model }}\n"
        "quoted = '{{ _base_.model.width }}'\nsecond = {{ _base_.names.1 }}\n"
        "mixed = 'w{{ _base_.model.width }}'\n"
    ),
    "c.yaml": (
        "_base_: base.json\nname: '{{ fileBasenameNoExtension }}'\nfull: {{fileBasename}}\n"
        'out: {{ fileDirname }}/runs\next: "{{ fileExtname }}"\ncopied: {{ _base_.model }}\n'
        "quoted: '{{ _base_.model.width }}'\nsecond: {{ _base_.names.1 }}\nmixed: w{{ _base_.model.width }}\n"
    ),
    "c.json": (
        '{"_base_": "base.json", "name": "{{ fileBasenameNoExtension }}", "full": {{fileBasename}},\n'
        '"out": "{{ fileDirname }}/runs", "ext": "{{ fileExtname }}", "copied": {{ _base_.model }},\n'
        '"quoted": "{{ _base_.model.width }}", "second": {{ _base_.names.1 }},'
        '"mixed": "w{{ _base_.model.width }}"}'
    ),
    "c.toml": (
        "_base_ = 'base.json'\nname = '{{ fileBasenameNoExtension }}'\nfull = {{fileBasename}}\n"
        'out = "{{ fileDirname }}/runs"\next = "{{ fileExtname }}"\ncopied = {{ _base_.model }}\n'
        "quoted = '{{ _base_.model.width }}'\nsecond = {{ _base_.names.1 }}\n"
        "mixed = 'w{{ _base_.model.width }}'\n"
    ),
}


@pytest.mark.parametrize("name", FORMATS_WITH_PLACEHOLDERS)
def test_placeholders_work_in_every_format(write, tmp_path, name):
    write("base.json", '{"model": {"width": 8}, "names": ["a", "b"]}')
    cfg = Config.fromfile(write(name, FORMATS_WITH_PLACEHOLDERS[name]))
    assert cfg.name == "c"
    assert cfg.full == name
    assert cfg.out == tmp_path.resolve().as_posix() + "/runs"
    assert cfg.ext == name[1:]
    assert cfg.copied == {"width": 8}
    assert cfg.quoted == 8
    assert cfg.second == "b"
    assert cfg.mixed == "w8"


@pytest.mark.parametrize(
    ("suffix", "line"),
    [
        (".py", "a = {A}\nb = '{A}'\nc = 'x{A}y'\n"),
        (".yaml", "a: {A}\nb: '{A}'\nc: x{A}y\n"),
        (".json", '{"a": {A}, "b": "{A}", "c": "x{A}y"}'),
        (".toml", "a = {A}\nb = '{A}'\nc = 'x{A}y'\n"),
    ],
)
def test_environment_variables_are_typed_outside_quotes(monkeypatch, suffix, line):
    text = line.replace("{A}", "{{$SLIP_A:1e-3}}")
    cfg = Config.fromstring(text, suffix)
    assert cfg.to_dict() == {"a": 1e-3, "b": "1e-3", "c": "x1e-3y"}
    monkeypatch.setenv("SLIP_A", "[1, 2]")
    assert Config.fromstring(text, suffix).to_dict() == {"a": [1, 2], "b": "[1, 2]", "c": "x[1, 2]y"}


def test_environment_variable_without_value_or_default_raises_an_error(monkeypatch):
    monkeypatch.delenv("SLIP_NONE", raising=False)
    with pytest.raises(ConfigError, match=r"<string>:2: the environment variable SLIP_NONE is not set"):
        Config.fromstring("a: 1\nb: {{ $SLIP_NONE }}\n", "yaml")


def test_environment_values_are_not_executed(monkeypatch, tmp_path):
    marker = tmp_path / "executed"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    monkeypatch.setenv("SLIP_A", code)
    for suffix, text in [
        (".py", "a = '''{A}'''\n"),
        (".yaml", "a: {A}\n"),
        (".toml", "a = {A}\n"),
        (".json", '{"a": {A}}'),
    ]:
        cfg = Config.fromstring(text.replace("{A}", "{{$SLIP_A:x}}"), suffix)
        assert cfg.a == code
    assert not marker.exists()


def test_placeholders_in_comments_are_ignored():
    assert Config.fromstring("a = 1  # {{ _base_.nope }} {{$NO_SUCH_VARIABLE}}\n", ".py").a == 1
    assert Config.fromstring("a: 1  # {{ _base_.nope }}\n", ".yaml").a == 1


def test_placeholders_are_replaced_before_python_code_runs(write, tmp_path):
    text = (
        "import os\na = os.path.basename('{{ fileDirname }}')\n"
        "b = f'{a}-{{ fileBasename }}'\nc = {'{{fileExtname}}': 1}\n"
    )
    cfg = Config.fromfile(write("x.py", text))
    assert cfg.to_dict() == {"a": tmp_path.name, "b": f"{tmp_path.name}-x.py", "c": {".py": 1}}


def test_toml_strings_and_comments_do_not_affect_placeholders():
    text = (
        "# don't\na = '''\nit's {{ fileBasename }}'''\n"
        'b = """\nsay "{{ fileBasename }}" """\nc = {{ fileBasename }}\n'
    )
    cfg = Config.fromstring(text, "toml")
    assert cfg.to_dict() == {"a": "it's <string>", "b": 'say "<string>" ', "c": "<string>"}


def test_base_path_can_contain_placeholders(write):
    write("other/base.yaml", "a: 1\n")
    child = write("exp/c.py", "_base_ = '{{ fileDirname }}/../other/base.yaml'\n")
    assert Config.fromfile(child).a == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\ny = (\n", r"a\.py:2: .*never closed"),
        ("a.py", "x = 1\ny = 1 / 0\n", r"a\.py:2: ZeroDivisionError: division by zero"),
        ("a.yaml", "x: 1\ny: [1, 2\nz: 3\n", r"a\.yaml: .*line 3"),
        ("a.yaml", "x: 1\nx: 2\n", r"a\.yaml: duplicate key 'x'"),
        ("a.yaml", "x: !!python/object/apply:os.getcwd []\n", r"a\.yaml: .*line 1"),
        ("a.yaml", "x: 1\n\x07", r"a\.yaml: .*special characters"),
        ("a.json", '{"x": 1,\n"y": }', r"a\.json: Expecting value: line 2"),
        ("a.json", '{"x": 1, "x": 2}', r"a\.json: duplicate key 'x'"),
        ("a.toml", "x = 1\ny = \n", r"a\.toml: Invalid value.*line 2"),
        ("a.toml", "x = 1\ny = [1,", r"a\.toml: "),
        ("a.yaml", "- 1\n- 2\n", r"a\.yaml: the top level must be a mapping, got list"),
        ("a.json", "3", r"a\.json: the top level"),
        ("a.yaml", "filename: x\n", r"filename: this name is reserved .*a\.yaml"),
        ("a.py", "text = 'x'\n", r"text: this name is reserved .*a\.py"),
        ("a.yaml", "1: x\n", r"top-level keys must be strings, got 1 .*a\.yaml"),
        ("a.py", "_base_ = 3\n", r"a\.py: _base_ must be a path or a list of paths, not 3"),
        ("a.py", "_base_ = list('ab')\n", r"a\.py:1: _base_ must be a literal"),
        ("a.yaml", "a: &a [*a]\n", r"a\.yaml: the values contain a cycle"),
        ("a.py", "a = []\na.append(a)\n", r"a\.py: the values contain a cycle"),
        ("a.txt", "x = 1\n", r"a\.txt: the file suffix must be one of \.py, .*, not '\.txt'"),
        ("a", "x = 1\n", r"the file suffix must be one of"),
    ],
)
def test_invalid_file_error_names_file_and_line(write, name, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Config.fromfile(write(name, text))
    assert "\n" not in str(caught.value)


def test_missing_file_error_suggests_the_nearest_name(write, tmp_path):
    write("unet_cityscapes.py", "")
    with pytest.raises(
        ConfigError, match=r"unet_cityscape\.py does not exist; did you mean 'unet_cityscapes\.py'"
    ):
        Config.fromfile(tmp_path / "unet_cityscape.py")
    with pytest.raises(ConfigError, match="does not exist either"):
        Config.fromfile(tmp_path / "nowhere" / "a.py")


def test_circular_bases_error_shows_the_cycle(write):
    write("a.py", "_base_ = 'b.yaml'\n")
    write("b.yaml", "_base_: sub/../a.py\n")
    path = write("sub/x", "").parent.parent / "a.py"
    with pytest.raises(ConfigError, match=r"cannot be its own base: .*a\.py -> .*b\.yaml -> .*a\.py"):
        Config.fromfile(path)


def test_key_in_two_bases_raises_an_error_with_both_files(write):
    write("one.py", "model = dict(a=1)\n")
    write("two.yaml", "model: {b: 1}\n")
    with pytest.raises(ConfigError, match=r"^model: .*one\.py and .*two\.yaml both set this"):
        Config.fromfile(write("c.py", "_base_ = ['one.py', 'two.yaml']\n"))


def test_merging_a_dict_into_a_value_raises_an_error_with_key_and_file(write):
    write("base.yaml", "model: {head: 3, free: null}\n")
    with pytest.raises(
        ConfigError, match=r"^model\.head: a dict cannot be merged into 3; .*_delete_.*child\.py"
    ):
        Config.fromfile(write("child.py", "_base_ = 'base.yaml'\nmodel = dict(head=dict(a=1))\n"))
    ok = write("ok.py", "_base_ = 'base.yaml'\nmodel = dict(head=dict(_delete_=True, a=1), free=dict(b=2))\n")
    assert Config.fromfile(ok).model == {"head": {"a": 1}, "free": {"b": 2}}


def test_custom_imports_are_optional(write, tmp_path, monkeypatch):
    marker = "SLIP_CUSTOM_IMPORT_RAN"
    monkeypatch.delenv(marker, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    write("slip_custom_module.py", f"import os\nos.environ['{marker}'] = '1'\n")
    path = write("a.yaml", "custom_imports: {imports: [slip_custom_module]}\n")
    Config.fromfile(path, import_custom_modules=False)
    assert marker not in os.environ
    Config.fromfile(path, trust=True)
    assert os.environ.pop(marker) == "1"


def test_dumped_configuration_finds_the_modules_of_the_original_file(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "project").mkdir()
    marker = "SLIP_MODULE_IN_FOLDER_RAN"
    (tmp_path / "project/slip_in_folder.py").write_text(f"import os\nos.environ['{marker}'] = '1'\n")
    (tmp_path / "project/a.py").write_text(
        "custom_imports = dict(imports=['slip_in_folder'], path='{{ fileDirname }}')\n"
    )
    cfg = Config.fromfile(tmp_path / "project/a.py")
    assert os.environ.pop(marker) == "1"
    cfg.dump(tmp_path / "dumped.py")
    del sys.modules["slip_in_folder"]
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path / "project")]
    Config.fromfile(tmp_path / "dumped.py")
    assert os.environ.pop(marker) == "1"


def test_untrusted_file_must_not_add_a_folder_to_the_module_search_path(write, tmp_path):
    before = list(sys.path)
    path = write("a.yaml", f"custom_imports: {{imports: [torch], path: {tmp_path}}}\n")
    with pytest.raises(ConfigError, match=r"custom_imports\.path: .*not trusted"):
        Config.fromfile(path)
    with pytest.raises(ConfigError, match=r"custom_imports\.path: must be an existing folder, not 'missing'"):
        Config.fromfile(write("b.py", "custom_imports = dict(imports=['torch'], path='missing')\n"))
    assert sys.path == before


def test_failed_custom_import_error_names_the_module(write):
    with pytest.raises(ConfigError, match=r"cannot import 'no_such_module_x'.*custom_imports\.path.*a\.py"):
        Config.fromfile(write("a.py", "custom_imports = dict(imports='no_such_module_x')\n"))
    text = "custom_imports = dict(imports=['no_such_module_x'], allow_failed_imports=True)\n"
    assert "custom_imports" in Config.fromfile(write("b.py", text))
    with pytest.raises(ConfigError, match="custom_imports: must be"):
        Config.fromfile(write("c.py", "custom_imports = 3\n"))
