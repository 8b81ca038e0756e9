"""Tests of looking up `type` names in registries."""

import importlib
import sys
import threading

import pytest
import torch

from slipstream import registry as registries
from slipstream.errors import UnknownNameError
from slipstream.registry import METRICS, MODELS, OPTIMIZERS, PARAM_SCHEDULERS, Registry, default_scope
from slipstream.registry.registry import init_default_scope


class Plain:
    pass


class Other:
    pass


@pytest.fixture
def family():
    """A root registry with two children. Both children have a `Head`, and one overrides `Plain`."""
    root = Registry("part", scope="slipstream")
    library = Registry("part", parent=root, scope="mylib")
    sibling = Registry("part", parent=root, scope="sibling")
    root.register_module(module=Plain)
    library.register_module(name="Plain", module=Other)
    library.register_module(name="Head", module=int)
    sibling.register_module(name="Head", module=float)
    return root, library, sibling


def test_child_overrides_a_name_in_its_parent(family):
    root, library, sibling = family
    assert (root.get("Plain"), library.get("Plain"), sibling.get("Plain")) == (Plain, Other, Plain)


def test_prefix_selects_the_registry(family):
    for start in family:
        assert start.get("mylib.Head") is int
        assert start.get("sibling.Head") is float
        assert start.get("slipstream.Plain") is Plain


@pytest.mark.parametrize("alias", ["mmengine", "super_gradients"])
def test_mmengine_and_super_gradients_scopes_map_to_the_root(family, alias):
    for start in family:
        assert start.get(f"{alias}.Plain") is Plain
    assert family[1].get(f"{alias}.Head") is None


def test_grandchild_is_found_and_searches_its_parents(family):
    root, library, _ = family
    plugin = Registry("part", parent=library, scope="plugin")
    plugin.register_module(name="Tail", module=str)
    assert root.get("plugin.Tail") is str
    assert plugin.get("Head") is int
    assert plugin.root is root


def test_default_scope_has_priority_inside_the_block(family):
    root, _, _ = family
    with default_scope("sibling"):
        assert root.get("Head") is float
        assert root.get("Plain") is Plain
        with default_scope("mylib"):
            assert root.get("Head") is int
            assert root.get("sibling.Head") is float
        assert root.get("Head") is float
    assert root.get("Head") is None


def test_root_or_unknown_default_scope_has_no_effect(family):
    for scope in ("elsewhere", "slipstream", "mmengine", None):
        with default_scope(scope):
            assert family[1].get("Plain") is Other


def test_default_scope_is_local_to_its_thread(family):
    seen = []

    def other_thread():
        init_default_scope("mylib")
        seen.append(family[0].get("Head"))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [int]
    assert family[0].get("Head") is None


# ---- registration ------------------------------------------------------------------------------------


def test_decorator_and_call_register_and_return_the_object():
    parts = Registry("part", scope="x")

    @parts.register_module()
    class A:
        pass

    @parts.register_module(name=["b", "bee"])
    def make():
        return 1

    assert parts.register_module(module=Plain) is Plain
    assert [parts.get(n) for n in ("A", "b", "bee", "Plain")] == [A, make, make, Plain]
    assert "make" not in parts
    assert len(parts) == 4


def test_duplicate_name_requires_force_or_the_same_object():
    parts = Registry("part", scope="x")
    parts.register_module(name="A", module=Plain)
    parts.register_module(name="A", module=Plain)
    with pytest.raises(KeyError, match=r"'A' is already registered in the part registry by .*force=True"):
        parts.register_module(name="A", module=Other)
    assert parts.get("A") is Plain
    parts.register_module(name="A", module=Other, force=True)
    assert parts.get("A") is Other


# ---- locations and namespaces ------------------------------------------------------------------------


def test_locations_are_imported_once_on_first_use(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_parts_of_test.py").write_text(
        "import sys\n"
        "owner = sys.modules['test_registry_lookup'].LAZY[0]\n"
        "assert owner.get('Early') is int  # a lookup during the import must not recurse\n"
        "owner.register_module(module=type('Lazy', (), {}))\n"
    )
    parts = Registry("part", scope="x", locations=["lazy_parts_of_test"])
    monkeypatch.setitem(sys.modules, "test_registry_lookup", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "LAZY", [parts], raising=False)
    parts.register_module(name="Early", module=int)
    assert parts.get("Early") is int
    assert "lazy_parts_of_test" not in sys.modules
    lazy = parts.get("Lazy")
    assert lazy.__name__ == "Lazy"
    del sys.modules["lazy_parts_of_test"]
    assert parts.get("Missing") is None
    assert "lazy_parts_of_test" not in sys.modules


def test_registered_objects_have_priority_over_namespaces():
    parts = Registry("part", scope="x", namespaces=["torch.optim"])
    assert parts.get("SGD") is torch.optim.SGD
    parts.register_module(name="SGD", module=Plain)
    assert parts.get("SGD") is Plain


def concrete(module, base):
    found = (getattr(module, name) for name in module.__all__)
    return [c for c in found if isinstance(c, type) and issubclass(c, base) and c is not base]


def test_all_torch_optimizers_are_found():
    optimizers = concrete(torch.optim, torch.optim.Optimizer)
    assert len(optimizers) > 10
    for cls in optimizers:
        assert OPTIMIZERS.get(cls.__name__) is cls
    assert OPTIMIZERS.get("PostLocalSGDOptimizer").__module__.startswith("torch.distributed.optim")
    assert OPTIMIZERS.get("ZeroRedundancyOptimizer").__module__ == "slipstream.optim.zero", (
        "a class from another module was found instead of Slipstream's"
    )


def test_all_torch_schedulers_are_found_unless_overridden():
    schedulers = concrete(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert len(schedulers) > 10
    for cls in schedulers:
        found = PARAM_SCHEDULERS.get(cls.__name__)
        assert found is cls or found.__module__.startswith("slipstream.")


def test_torchmetrics_metrics_are_found():
    torchmetrics = pytest.importorskip("torchmetrics")
    assert METRICS.get("MeanSquaredError") is torchmetrics.MeanSquaredError
    assert METRICS.get("MulticlassAccuracy") is torchmetrics.classification.MulticlassAccuracy
    assert METRICS.get("GeneralizedDiceScore") is torchmetrics.segmentation.GeneralizedDiceScore


@pytest.mark.parametrize(
    ("registry", "name"),
    [
        ("DATASETS", "ConcatDataset"),
        ("DATA_SAMPLERS", "DefaultSampler"),
        ("EVALUATOR", "Evaluator"),
        ("FUNCTIONS", "default_collate"),
        ("HOOKS", "EMAHook"),
        ("LOG_PROCESSORS", "LogProcessor"),
        ("LOOPS", "IterBasedTrainLoop"),
        ("METRICS", "IoUMetric"),
        ("MODELS", "ImgDataPreprocessor"),
        ("MODEL_WRAPPERS", "MMDistributedDataParallel"),
        ("OPTIM_WRAPPERS", "AmpOptimWrapper"),
        ("OPTIM_WRAPPER_CONSTRUCTORS", "DefaultOptimWrapperConstructor"),
        ("PARAM_SCHEDULERS", "CosineAnnealingLR"),
        ("RUNNERS", "Runner"),
        ("VISBACKENDS", "TensorboardVisBackend"),
        ("VISUALIZERS", "Visualizer"),
        ("WEIGHT_INITIALIZERS", "Kaiming"),
    ],
)
def test_components_are_found_by_mmengine_names(registry, name):
    found = getattr(registries, registry).get(name)
    assert found.__module__.startswith(("slipstream.", "torch.utils.data"))


# ---- unknown names -----------------------------------------------------------------------------------


def test_unknown_name_error_names_the_nearest_entry(family):
    root, library, _ = family
    with pytest.raises(UnknownNameError, match=r"^'Plan' is not a registered part; did you mean 'Plain'\?$"):
        library.resolve("Plan")
    with pytest.raises(UnknownNameError, match="did you mean 'Head'"):
        root.resolve("mylib.Haed")
    with default_scope("mylib"), pytest.raises(UnknownNameError, match="did you mean 'Head'"):
        root.resolve("Haed")
    with pytest.raises(KeyError, match=r"^'Zebra' is not a registered part$"):
        root.resolve("Zebra")


def test_lookup_imports_only_required_locations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lookup_first", "lookup_second"):
        (tmp_path / f"{name}.py").write_text(
            f"from lookup_home import HOME\n@HOME.register_module(name='{name}')\nclass Thing: ...\n"
        )
    (tmp_path / "lookup_home.py").write_text(
        "from slipstream.registry import Registry\n"
        "HOME = Registry('home', locations=['lookup_second', 'lookup_first'])\n"
    )
    home = importlib.import_module("lookup_home").HOME
    assert home.get("lookup_first").__module__ == "lookup_first"
    assert "lookup_second" not in sys.modules
    assert home.names() == ["lookup_first", "lookup_second"]


def test_an_empty_registry_with_locations_is_found_and_inherits_from_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    root = Registry("part", build_func=lambda cfg, registry: (cfg, registry), scope="slipstream")
    library = Registry("part", parent=root, scope="mylib", locations=["late_library_parts"])
    (tmp_path / "late_library_parts.py").write_text(
        "import sys\nsys.modules['the_library'].register_module(name='Late', module=int)\n"
    )
    monkeypatch.setitem(sys.modules, "the_library", library)
    assert root.get("mylib.Late") is int
    assert library.root is root
    assert library.build({}) == ({}, library)


def test_the_default_scope_of_a_library_imports_its_registries(tmp_path, monkeypatch):
    package = tmp_path / "mmyolo"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "registry.py").write_text(
        "from slipstream.registry import MODELS, Registry\n"
        "OWN = Registry('model', parent=MODELS, scope='mmyolo')\n"
        "OWN.register_module(name='OnlyInTheLibrary', module=int)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with default_scope("mmyolo"):
            assert MODELS.get("OnlyInTheLibrary") is int
            with MODELS.switch_scope_and_registry(None) as registry:
                assert registry.scope == "mmyolo"
        assert MODELS.get("OnlyInTheLibrary") is None
        with MODELS.switch_scope_and_registry("mmyolo") as registry:
            assert registry.get("OnlyInTheLibrary") is int
    finally:
        MODELS.children.pop("mmyolo", None)
        sys.modules.pop("mmyolo", None)
        sys.modules.pop("mmyolo.registry", None)
