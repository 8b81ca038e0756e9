"""Tests of redaction: which names and texts count as secrets, and where their values must not appear."""

import copy
import logging
import pickle
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.logging import build_logger
from slipstream.redaction import REDACTED, Redactor, Reference, is_secret_name, redact, redact_errors

VALUE = "0123e4567890-not-for-files"


@pytest.mark.parametrize(
    "name",
    ["api_key", "WANDB_API_KEY", "apiKey", "token", "HF_TOKEN", "auth-token", "password", "PGPASSWORD", "secret",
     "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "credentials", "db_pass", "private_key", "webhook_url"],
)  # fmt: skip
def test_secret_names_are_recognized(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["key", "cache_key", "tokenizer", "num_tokens", "token_dim", "cls_token", "pad_token", "passes", "author", "lr",
     "secretary", "image_key", 3, None],
)  # fmt: skip
def test_option_names_are_not_secrets(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    ["ghp_" + "a1" * 18, "hf_" + "Ab1" * 11, "sk-" + "x" * 30, "AKIA" + "A1" * 8, "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc",
     "glpat-" + "x" * 20, "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_known_tokens_are_replaced_inside_text(text):
    assert redact({"note": f"use {text}"}) == {"note": f"use {REDACTED}"}
    assert redact(["https://bob:hunter2@host/x"]) == [f"https://{REDACTED}@host/x"]


def test_only_text_and_long_numbers_under_secret_keys_are_replaced():
    tree = {
        "password": "x",
        "credentials": {"user": "bob", "retry": True},
        "token": 123456,
        "pass": 2,
        "auth": None,
    }
    assert redact(tree) == {
        "password": REDACTED,
        "credentials": {"user": REDACTED, "retry": True},
        "token": REDACTED,
        "pass": 2,
        "auth": None,
    }


@pytest.mark.parametrize("suffix", ["py", "yaml", "json", "toml"])
def test_dumps_refer_to_environment_variables_and_can_be_loaded(monkeypatch, suffix):
    pytest.importorskip("tomli_w")
    monkeypatch.setenv("MY_API_KEY", VALUE)
    monkeypatch.setenv("DATA_PLACE", "/data/somewhere")
    source = (
        "key: {{ $MY_API_KEY }}\nroot: '{{ $DATA_PLACE:/x }}'\npath: \"{{ $DATA_PLACE }}/train\"\n"
        "default: {{ $NOT_SET_HERE:abc }}\nnumber: {{ $NOT_SET_HERE:3 }}\n"
    )
    cfg = Config.fromstring(source, "yaml")
    assert cfg.key == VALUE
    assert cfg.number == 3
    text = Config(dict(cfg), filename=f"x.{suffix}").dump()
    assert VALUE not in text
    assert "/data/somewhere" not in text
    assert "{{ $MY_API_KEY }}" in text
    assert "{{ $DATA_PLACE:/x }}" in text
    loaded = Config.fromstring(text, suffix)
    assert loaded.to_dict() == cfg.to_dict()
    assert cfg.to_dict()["path"] == "/data/somewhere/train"
    assert VALUE in Config(dict(cfg), filename=f"x.{suffix}").dump(secrets=True)


def test_references_survive_copies_and_merges(monkeypatch):
    monkeypatch.setenv("PLACE", "/somewhere")
    cfg = Config.fromstring("a: {{ $PLACE }}\nb: {c: {{ $PLACE }}}\n", "yaml")
    cfg.merge_from_dict({"b.d": cfg.a})
    for other in (pickle.loads(pickle.dumps(cfg)), copy.deepcopy(cfg)):
        assert isinstance(other.b.d, Reference)
        assert other.pretty_text == cfg.pretty_text
        assert "/somewhere" not in repr(other)
    assert all(type(v) is str for v in (cfg.to_dict()["a"], cfg.to_dict()["b"]["c"]))


def test_python_files_may_use_secrets_in_any_expression(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", VALUE)
    source = "import os\na = os.environ['MY_API_KEY']\nb = f'x{a}'\nc = 'y {{ $MY_API_KEY }}'\nd = {{ $MY_API_KEY }}\n"
    cfg = Config.fromstring(source, "py")
    assert (cfg.a, cfg.b, cfg.c, cfg.d) == (VALUE, f"x{VALUE}", f"y {VALUE}", VALUE)
    assert VALUE not in cfg.pretty_text
    assert Config.fromstring(cfg.pretty_text, "py").to_dict() == cfg.to_dict()


def test_an_api_key_that_consists_of_digits_remains_text(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "0123e4")
    assert Config.fromstring("a: {{ $MY_API_KEY }}\n", "yaml").a == "0123e4"


def test_log_lines_and_tracebacks_contain_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", VALUE)
    logger = build_logger(
        "x", tmp_path / "x.log", "ERROR", redactor=Redactor({"init": {"password": "open-sesame"}})
    )
    logger.info("a %s", VALUE)
    logger.info("no secret: %d", 3)
    try:
        raise ValueError(f"cannot log in with open-sesame and {VALUE}")
    except ValueError as error:
        logger.log(logging.INFO, "failed: %s", error, exc_info=True)
    logger.close()
    text = (tmp_path / "x.log").read_text()
    assert VALUE not in text
    assert "open-sesame" not in text
    assert "no secret: 3" in text
    assert "a {{ $MY_API_KEY }}" in text
    assert f"ValueError: cannot log in with {REDACTED} and {{{{ $MY_API_KEY }}}}" in text


def test_errors_their_notes_and_causes_contain_no_secret(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", VALUE)
    error = ConfigError(f"must be a number, not '{VALUE}'", "a.b")
    error.add_note(f"value: {VALUE}")
    error.__cause__ = KeyError(VALUE)
    with pytest.raises(ConfigError) as caught, redact_errors(Redactor()):
        raise error
    assert str(caught.value) == "a.b: must be a number, not '{{ $MY_API_KEY }}'"
    assert VALUE not in repr((caught.value.__notes__, caught.value.__cause__))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", f"/data/{VALUE}/x.png"),
        KeyError((VALUE,)),
        ValueError({"t": [VALUE]}),
        ExceptionGroup("several", [ValueError(VALUE), OSError(5, "broken", f"/{VALUE}")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_contain_no_secret_outside_their_first_text(error, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", VALUE)
    with pytest.raises(type(error)) as caught, redact_errors(Redactor()):
        raise error
    text = "".join(traceback.format_exception(caught.value, chain=False))
    assert VALUE not in text.replace(f'"{VALUE}"', "")
    assert "{{ $MY_API_KEY }}" in text


def test_stored_values_contain_no_secret_by_key_or_by_value(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", VALUE)
    tree = {
        "api_key": "a",
        VALUE: {"password": ("b", 1234567)},
        "url": Reference(f"x/{VALUE}", "x/{{ $MY_API_KEY }}"),
    }
    assert Redactor().tree(tree) == {
        "api_key": REDACTED,
        "{{ $MY_API_KEY }}": {"password": (REDACTED, 1234567)},
        "url": "x/{{ $MY_API_KEY }}",
    }


@dataclass
class Login:
    value: str


@dataclass
class LoginWithState:
    user: str

    def __post_init__(self):
        self.value = "open-sesame"


@dataclass(slots=True)
class Slotted:
    value: str


@pytest.mark.parametrize(
    "container",
    [["open-sesame"], {"open-sesame"}, frozenset(["open-sesame"]), b"open-sesame", partial(print, "open-sesame"),
     partial(print, end="open-sesame"), deque(["open-sesame"]), SimpleNamespace(value="open-sesame"),
     Login("open-sesame"), Slotted("open-sesame"),
     LoginWithState("me")],
    ids=repr,
)  # fmt: skip
def test_secrets_in_any_container_are_removed_from_text(container):
    assert Redactor({"password": container})("login with open-sesame") == f"login with {REDACTED}"


@pytest.mark.parametrize(
    "secret", [b"\x8f\x02\xd1secret-key", "pa'ss\"word-1234", "pa\\ssword-1234", "two\nlines-1234"], ids=repr
)
def test_secrets_that_a_message_quotes_are_removed(secret):
    assert Redactor({"password": secret})(f"wrong value {secret!r} given").count(REDACTED) == 1


def test_working_directory_is_not_a_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/someone/project")
    monkeypatch.setenv("DB_PWD", "correct horse")
    redactor = Redactor({})
    assert redactor("/home/someone/project/work_dirs") == "/home/someone/project/work_dirs"
    assert redactor("correct horse") == "{{ $DB_PWD }}"
