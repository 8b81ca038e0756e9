"""Public names are imported on first use, and modules that only some runs need are imported when they are needed.

Imports change neither the state of the garbage collector nor the random state.
"""

import gc
import subprocess
import sys

import pytest

import slipstream


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("module", ["slipstream.errors", "slipstream.no_such_module"])
def test_garbage_collection_is_as_before_after_an_import(monkeypatch, module, enabled):
    monkeypatch.setitem(slipstream._MODULES, "SlipstreamError", module)
    (gc.enable if enabled else gc.disable)()
    try:
        if module == "slipstream.errors":
            assert slipstream.SlipstreamError is slipstream.errors.SlipstreamError
        else:
            with pytest.raises(ModuleNotFoundError):
                slipstream.SlipstreamError  # noqa: B018
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'slipstream' has no attribute 'Runer'"):
        slipstream.Runer  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    ["slipstream.tune", "from slipstream.logging import MMLogger; MMLogger.get_instance('first')"],
)
def test_first_use_does_not_change_the_random_state(statement):
    code = f"import random, slipstream; state = random.getstate(); {statement}; assert random.getstate() == state"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runner_does_not_import_modules_that_only_some_runs_need():
    unneeded = [
        "slipstream.report",  # until a run starts
        "slipstream.speed.compile_report",
        "slipstream.speed.compiled_modules",
        "slipstream.speed.graph_step",
        "slipstream.step.graph",
        "slipstream.tune",
        "torch._dynamo",
        "torch._inductor",
    ]
    code = f"import sys, slipstream; slipstream.Runner; print(*(name for name in {unneeded} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.split() == []
