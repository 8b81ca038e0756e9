"""Test that untrusted recipes cannot execute code or exhaust time or memory."""

import sys
import time

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.recipes import compose, find_recipe
from slipstream.recipes.compose import hydra_overrides
from slipstream.registry import HOOKS, METRICS
from slipstream.training.callbacks import callback_hooks
from slipstream.training.losses import loss_config
from slipstream.training.metrics import metric_config
from slipstream.training.translate import work_dir

pytest.importorskip("hydra")

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
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


def test_built_in_recipes_pass_the_checks():
    for name in ("cityscapes_regseg48", "cifar10_resnet"):
        assert hydra_overrides(find_recipe(name), ["lr=0.1"])


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


def test_yaml_bombs_in_recipes_and_their_groups_are_rejected_immediately(recipe):
    bombs = [
        (recipe(RECIPE + BOMB), []),
        (recipe("defaults: [{group: bomb}, _self_]\narchitecture: x\n", "one"), []),
        (recipe("defaults: [{group: '${choice}'}, _self_]\nchoice: bomb\narchitecture: x\n", "two"), []),
        (recipe(RECIPE, "three"), ["+group=bomb"]),
        (recipe("defaults: [group/outer, _self_]\narchitecture: x\n", "four"), []),
        (recipe(f"{RECIPE}a: {'[' * 5000}\n", "five"), []),
    ]
    recipe(BOMB, "group/bomb")
    recipe("defaults: [bomb]\n", "group/outer")
    for path, overrides in bombs:
        begin = time.process_time()
        with pytest.raises(ConfigError, match=r"the aliases expand to more than|nested too deeply"):
            compose(str(path), overrides)
        assert time.process_time() - begin < 1, path


DOUBLED = {
    "text": "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 30)),
    "lists": "".join(f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']\n" for i in range(1, 30)),
    "resolvers": "".join(
        f"a{i}: '${{oc.select:a{i - 1}}}${{oc.decode:${{a{i - 1}}}}}'\n" for i in range(1, 30)
    ),
    "indirect": "".join(f"k{i}: a{i}\na{i}: '${{${{k{i - 1}}}}}${{${{k{i - 1}}}}}'\n" for i in range(1, 30)),
}


@pytest.mark.parametrize("kind", DOUBLED)
def test_interpolations_that_grow_exponentially_are_rejected_immediately(recipe, kind):
    path = recipe(f"{RECIPE}k0: a0\na0: xx\n{DOUBLED[kind]}hydra: {{searchpath: ['${{a29}}']}}\n")
    for read in (lambda: compose(str(path)), lambda: hydra_overrides(path, [])):
        begin = time.process_time()
        with pytest.raises(
            ConfigError, match=r"^a\d+.*: the interpolations refer to more than 10,000 values"
        ):
            read()
        assert time.process_time() - begin < 1


def test_long_lists_do_not_count_as_interpolations(recipe):
    values = compose(str(recipe(f"{RECIPE}long: {list(range(20_000))}\nfirst: '${{long.0}}'\n")))
    assert (len(values["long"]), values["first"]) == (20_000, 0)


def test_interpolations_that_contain_themselves_are_rejected(recipe):
    for text in ("a: ${a}\n", "a: ${b}\nb: ${a}\n", "a: ['${a}']\n"):
        with pytest.raises(ConfigError):
            compose(str(recipe(RECIPE + text)))


def test_values_of_environment_variables_are_not_dumped(recipe, monkeypatch):
    monkeypatch.setenv("TRACKER_API_KEY", "0123-key-of-a-tracker")
    monkeypatch.setenv("DATA_PLACE", "/data/somewhere")
    text = "a: ${oc.env:TRACKER_API_KEY}\nb: ${oc.env:DATA_PLACE}/x\nc: ${a}\nd: ${oc.env:NOT_SET_HERE,y}\n"
    values = compose(str(recipe(RECIPE + text)))
    assert (values["a"], values["b"], values["d"]) == ("0123-key-of-a-tracker", "/data/somewhere/x", "y")
    dumped = Config(values).pretty_text
    assert "0123-key" not in dumped
    assert "/data/somewhere" not in dumped
    assert Config.fromstring(dumped, "py").to_dict() == Config(values).to_dict()


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../../x", ".."])
def test_experiment_names_cannot_refer_to_paths_outside_the_root_folder(name):
    for folder in (lambda: work_dir(name, "root"), lambda: output_dir("root", name)):
        with pytest.raises(
            ConfigError, match=r"experiment_name: must be the name of a file inside ckpt_root_dir"
        ):
            folder()
    assert work_dir("group/x", "root") == output_dir("root", "group/x") == "root/group/x"
