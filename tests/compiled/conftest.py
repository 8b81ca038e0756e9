"""Reset the compiler and the random seed before each test."""

import pytest
import torch
from compiled_runs import seed


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    seed()
    yield
    torch._dynamo.reset()
