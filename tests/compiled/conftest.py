"""Each test starts with an empty compiler and the same random numbers."""

import pytest
import torch
from compiled_runs import seed


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    seed()
    yield
    torch._dynamo.reset()
