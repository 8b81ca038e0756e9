"""Tests of the base classes and messages of the exceptions."""

import pickle

import pytest

from slipstream import errors
from slipstream.errors import (
    BuildError,
    CheckpointError,
    ConfigError,
    LossError,
    NonFiniteLossError,
    SlipstreamError,
    UnknownNameError,
    did_you_mean,
)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ConfigError, (SlipstreamError, ValueError)),
        (UnknownNameError, (ConfigError, KeyError)),
        (BuildError, (ConfigError, TypeError)),
        (LossError, (SlipstreamError, TypeError, ValueError)),
        (NonFiniteLossError, (SlipstreamError, FloatingPointError)),
        (CheckpointError, (SlipstreamError, RuntimeError)),
    ],
)
def test_errors_derive_from_built_in_exceptions(error, bases):
    for base in bases:
        assert issubclass(error, base)


def test_every_error_derives_from_one_base():
    for name in errors.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(errors, name), SlipstreamError)


@pytest.mark.parametrize("error", [ConfigError, UnknownNameError, BuildError])
def test_message_has_no_quotes_and_follows_the_path(error):
    assert str(error("no such 'thing'")) == "no such 'thing'"
    assert str(error("no such 'thing'", "a.b[2]")) == "a.b[2]: no such 'thing'"


def test_error_from_a_worker_process_keeps_its_message():
    error = pickle.loads(pickle.dumps(UnknownNameError("no such thing", "dataset.type")))
    assert str(error) == "dataset.type: no such thing"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sgd", "; did you mean 'SGD'?"),
        ("AdmaW", "; did you mean 'AdamW'?"),
        ("Zebra", ""),
        ("", ""),
    ],
)
def test_closest_name_is_suggested_case_insensitively(name, hint):
    assert did_you_mean(name, ["SGD", "AdamW", "RMSprop"]) == hint
