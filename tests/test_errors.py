"""Tests of the base classes and messages of the exceptions."""

import pickle

from slipstream import errors
from slipstream.errors import (
    SlipstreamError,
    UnknownNameError,
)


def test_every_error_derives_from_one_base():
    for name in errors.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(errors, name), SlipstreamError)


def test_error_from_a_worker_process_keeps_its_message():
    error = pickle.loads(pickle.dumps(UnknownNameError("no such thing", "dataset.type")))
    assert str(error) == "dataset.type: no such thing"
