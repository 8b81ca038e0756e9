"""Tests on an `npu` accelerator: the simulated NPU (`make npu`) or an Ascend device."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder, and skip them if there is no NPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    for item in items:
        if "/tests/npu/" not in str(item.path):
            continue
        item.add_marker(pytest.mark.npu)
        if device is None or device.type != "npu":
            item.add_marker(pytest.mark.skip(reason="requires an NPU; run make npu to use the simulated one"))
