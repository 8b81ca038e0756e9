"""Public names are imported on first use, and the import does not change the garbage collector's state."""

import gc

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
