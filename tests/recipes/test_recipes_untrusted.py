"""Test that untrusted recipes cannot execute code or exhaust time or memory."""

import sys

import pytest

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.recipes import compose
from slipstream.recipes.compose import hydra_overrides
from slipstream.registry import HOOKS, METRICS
from slipstream.training.callbacks import callback_hooks
from slipstream.training.losses import loss_config
from slipstream.training.metrics import metric_config

pytest.importorskip("hydra")

RECIPE = "defaults: [_self_]\narchitecture: regseg48\n"


@pytest.fixture
def recipe(tmp_path):
    def write(text, name="hostile"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def evil(tmp_path, monkeypatch):
    (tmp_path / "evil_package").mkdir()
    (tmp_path / "evil_package" / "__init__.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('was_here').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "evil_package" / "was_here").exists
    sys.modules.pop("evil_package", None)


@pytest.mark.parametrize("entry", ["pkg://evil_package", "pkg://slipstream_evil", "pkg://${oc.env:HOME}",
                                   "${oc.decode:'pkg'}://evil_package", "s3://x"])  # fmt: skip
def test_a_search_path_does_not_import_packages(recipe, evil, entry):
    path = recipe(f'{RECIPE}hydra: {{searchpath: ["{entry}"]}}\n')
    for read in (compose, lambda name: hydra_overrides(path, [])):
        with pytest.raises(
            ConfigError, match=r"hydra.searchpath: .*hostile\.yaml is not trusted to execute code.*--trust"
        ):
            read(str(path))
    assert not evil()


def test_a_trusted_search_path_and_a_search_path_in_an_override_import_packages(recipe, evil):
    path = recipe(RECIPE + "hydra: {searchpath: [pkg://evil_package]}\n")
    assert compose(str(path), trust=True)["architecture"] == "regseg48"
    assert evil()
    assert compose(str(path), ["hydra.searchpath=[pkg://evil_package]"])["architecture"] == "regseg48"


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("callbacks: {x: {_target_: os.system, command: 'touch was_here'}}", r"hydra\.callbacks\.x\._target_"),
        ("launcher: {_target_: evil_package.Launcher}", r"hydra\.launcher\._target_"),
        ("hydra_logging: {version: 1, formatters: {x: {(): os.system, command: 'touch was_here'}}}",
         r"hydra\.hydra_logging\.formatters\.x\.\(\)"),
        ("hydra_logging: {version: 1, handlers: {x: {class: evil_package.Handler}}}",
         r"hydra\.hydra_logging\.handlers\.x\.class"),
        ("hydra_logging: {version: 1, x: 'ext://evil_package.y'}", r"hydra\.hydra_logging\.x"),
        ("job: {env_set: {LD_PRELOAD: evil.so}}", r"hydra\.job\.env_set\.LD_PRELOAD"),
    ],
)  # fmt: skip
def test_the_hydra_section_executes_no_code(recipe, evil, section, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe(f"{RECIPE}hydra:\n  {section}\n")
    with pytest.raises(ConfigError, match=rf"{key}: .*hostile\.yaml is not trusted to execute code.*--trust"):
        hydra_overrides(path, [])
    compose(str(path))  # reads the section without using it
    assert not evil()
    assert not (tmp_path / "was_here").exists()
    assert hydra_overrides(path, [], trust=True)


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "evil_package.run", "subprocess.Popen"])
def test_targets_are_names_that_are_not_imported(recipe, evil, target):
    text = f"training_hyperparams: {{loss: {{_target_: {target}, command: 'true'}}}}\n"
    entry = compose(str(recipe(RECIPE + text)))["training_hyperparams"]["loss"]
    name = target.rpartition(".")[2]
    with pytest.raises(UnknownNameError, match=f"no loss is named '{name}'"):
        loss_config(entry)
    for registry, translate in ((METRICS, metric_config), (HOOKS, callback_hooks)):
        with pytest.raises(ConfigError):
            registry.build(next(iter(translate([entry]))))
    assert not evil()
