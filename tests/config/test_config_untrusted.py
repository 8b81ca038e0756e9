"""Test that hostile configuration files do not execute code."""

import sys

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError

EVIL = "from pathlib import Path\nPath(__file__).with_name('was_here').touch()\n"


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that creates a file when it is executed. The fixture returns a function that checks for this file."""
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "was_here").exists
    sys.modules.pop("evil_module", None)


@pytest.mark.parametrize("name", ["evil_module", "json.evil_module", "slipstream_evil", "unittest.__main__",
                                  "torch.__main__", "slipstream.__main__", "antigravity"])  # fmt: skip
@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_a_data_file_does_not_import_modules(write, evil, name, suffix):
    text = {"yaml": "custom_imports: {imports: [%s], allow_failed_imports: true}", "json":
            '{"custom_imports": {"imports": ["%s"]}}', "toml": 'custom_imports = {imports = ["%s"]}'}  # fmt: skip
    before = set(sys.modules)
    with pytest.raises(
        ConfigError, match=rf"custom_imports: .*a\.{suffix} is not trusted.*'{name}'.*--trust.*trust=True"
    ):
        Config.fromfile(write(f"a.{suffix}", text[suffix] % name))
    assert name not in set(sys.modules) - before
    assert not evil()


def test_a_trusted_data_file_imports_modules(write, evil):
    path = write("a.yaml", "custom_imports: {imports: [evil_module]}\n")
    Config.fromfile(path, trust=True)
    assert evil()
    Config.fromfile(path)  # needs no trust, because the module is already imported


def test_a_python_file_and_its_bases_are_trusted(write, evil):
    write("base.yaml", "_base_: inner.py\ncustom_imports: {imports: [evil_module]}\n")
    write("inner.py", "x = 1\n")
    assert Config.fromfile(write("a.py", "_base_ = 'base.yaml'\n")).x == 1
    assert evil()


@pytest.mark.parametrize("base", ["evil_module.py", "EVIL.PY", "middle.yaml"])
def test_a_data_file_does_not_execute_a_python_base(write, evil, base):
    write("EVIL.PY", EVIL)
    write("middle.yaml", "_base_: evil_module.py\n")
    path = write("a.yaml", f"_base_: {base}\n")
    with pytest.raises(ConfigError, match=r"_base_: .*is not trusted to execute code.*--trust"):
        Config.fromfile(path)
    with pytest.raises(ConfigError, match="--trust"):
        Config.fromstring(f"_base_: {path.parent}/{base}", "yaml")
    assert not evil()
    if base != "EVIL.PY":
        Config.fromfile(path, trust=True)
        assert evil()


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch was_here']\n",
        "a: !!python/name:os.system\n",
        "!!python/module:evil_module\n",
        "type: os.system\ncommand: touch was_here\n",
    ],
)
def test_yaml_tags_and_types_execute_nothing(text, evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        cfg = Config.fromstring(text, "yaml")
    except ConfigError:
        cfg = None
    if cfg is not None:
        from slipstream.registry import FUNCTIONS, HOOKS, MODELS

        for registry in (MODELS, HOOKS, FUNCTIONS):
            with pytest.raises(ConfigError, match="is not a registered"):
                registry.build(cfg)
    assert not evil()
