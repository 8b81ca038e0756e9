"""Tests of redaction: which names and texts count as secrets, and that written configurations do not contain them."""

from functools import partial

import pytest

from slipstream.config import Config
from slipstream.redaction import REDACTED, is_secret_name, redact

VALUE = "0123e4567890-not-for-files"


@pytest.mark.parametrize(
    "name",
    ["api_key", "WANDB_API_KEY", "apiKey", "HF_TOKEN", "auth-token", "PGPASSWORD", "db_pass", "webhook_url"],
)
def test_secret_names_are_recognized(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["key", "tokenizer", "num_tokens", "cls_token", "passes", "author", "lr", 3, None]
)
def test_option_names_are_not_secrets(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    ["ghp_" + "a1" * 18, "hf_" + "Ab1" * 11, "sk-" + "x" * 30, "AKIA" + "A1" * 8, "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc",
     "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"],
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
    login = redact({"login": partial(print, 3, password="x")})["login"]
    assert (login.args, login.keywords) == ((3,), {"password": REDACTED})


@pytest.mark.parametrize("suffix", ["py", "yaml", "json", "toml"])
def test_dumps_refer_to_secret_environment_variables_and_can_be_loaded(monkeypatch, suffix):
    pytest.importorskip("tomli_w")
    monkeypatch.setenv("MY_API_KEY", VALUE)
    cfg = Config.fromstring("key: {{ $MY_API_KEY }}\nurl: 'http://host/{{ $MY_API_KEY }}'\n", "yaml")
    assert cfg.key == VALUE
    text = Config(dict(cfg), filename=f"x.{suffix}").dump()
    assert VALUE not in text
    assert Config.fromstring(text, suffix).to_dict() == cfg.to_dict()
    assert VALUE in Config(dict(cfg), filename=f"x.{suffix}").dump(secrets=True)


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


def test_working_directory_is_not_a_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/someone/project")
    assert redact("/home/someone/project/work_dirs") == "/home/someone/project/work_dirs"
