"""Remove secrets from text that is written to files and logs.

Secrets are the values of environment variables and configuration keys whose names indicate a secret (`WANDB_API_KEY`,
`password`), and strings in known token formats (`ghp_...`).
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

__all__ = [
    "REDACTED",
    "Redactor",
    "Reference",
    "is_secret_name",
    "redact",
    "redact_errors",
    "redact_text",
]

REDACTED = "<redacted>"

_NAME = re.compile(
    r"(?:^|_)(?:(?:api|access|private|secret|signing|encryption|account|auth)_?keys?(?:_id)?|secrets?|passphrase|pass"
    r"|pwd|credentials?|auth|authorization|bearer|connection_string|webhook_url|token)$|passw(?:or)?d$"
)
# Special tokenizer tokens, which are not secrets.
_VOCABULARY = re.compile(r"(?:class|cls|pad|mask|bos|eos|unk|sep|start|end|image|dist|prompt|special)_token$")
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,}"
    r"|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^\s/:@'\"]*:[^\s/@'\"]+(?=@)"
)
_MIN_LENGTH = 8  # characters; a shorter value could be an ordinary word


class Reference(str):
    """A string in which references to environment variables have been replaced by their values.

    Attributes:
        reference: the original string, with `{{ $NAME }}` instead of the values. Only this string is written to files.
    """

    reference: str

    def __new__(cls, value: str, reference: str) -> Reference:
        """Return `value` with its reference."""
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.reference


def is_secret_name(name: Any) -> bool:
    """Return whether the name of a key or an environment variable indicates that its value is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()
    return _NAME.search(words) is not None and _VOCABULARY.search(words) is None


class Redactor(logging.Filter):
    """Replaces secrets in strings: values from a configuration and from the environment, and known tokens.

    When used as a logging filter, it replaces secrets in log records and their tracebacks.

    Args:
        tree: a configuration, as nested dicts and lists.
    """

    def __init__(self, tree: Any = None) -> None:
        super().__init__()
        replacements = {value: REDACTED for value in _secrets(tree) if len(value) >= _MIN_LENGTH}
        replacements |= {
            value: f"{{{{ ${name} }}}}"
            for name, value in os.environ.items()
            if len(value) >= _MIN_LENGTH and is_secret_name(name) and name != "PWD"  # the working directory
        }
        # Replace longer secrets first, because a secret may be part of a longer secret.
        self._replacements = sorted(replacements.items(), key=lambda item: -len(item[0]))

    def __call__(self, text: str) -> str:
        """Return `text` without secrets."""
        for value, replacement in self._replacements:
            text = text.replace(value, replacement)
        return _TOKEN.sub(REDACTED, text)

    def tree(self, value: Any) -> Any:
        """Return nested dicts, lists, tuples and sets without secrets, as `redact` does, but with all numbers kept.

        A resumed run may need the numbers.
        """
        return _redact_value(value, self, secret=False, numbers=False)

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the secrets in a log record; return True, because no record is dropped."""
        text = record.getMessage()
        if record.exc_info and not record.exc_text:
            record.exc_text = self(logging.Formatter().formatException(record.exc_info))
        if (redacted := self(text)) != text:
            record.msg, record.args = redacted, None
        return True


def redact_text(text: str) -> str:
    """Return `text` without known tokens and without the values of secret environment variables."""
    return Redactor()(text)


def redact(tree: Any) -> Any:
    """Return a copy of `tree` (nested dicts, lists, tuples, sets and arguments of partials) without secrets.

    A `Reference` is replaced by its `reference` string. If a key's name indicates a secret, the value is replaced by
    `<redacted>`.
    """
    return _redact_value(tree, Redactor(), secret=False)


def _redact_value(value: Any, redactor: Redactor, secret: bool, numbers: bool = True) -> Any:
    """Return `value` without secrets.

    `secret` is True if the name of a key that contains `value` indicates a secret. If `numbers` is False, all numbers
    are kept.
    """
    convert = partial(_redact_value, redactor=redactor, numbers=numbers)
    if isinstance(value, dict):
        return {
            convert(key, secret=False): convert(item, secret=secret or is_secret_name(key))
            for key, item in value.items()
        }
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(convert(item, secret=secret) for item in value)
    if isinstance(value, partial):
        args, keywords = (convert(part, secret=secret) for part in (value.args, value.keywords))
        return partial(value.func, *args, **keywords)
    if isinstance(value, Reference):
        return redactor(value.reference)
    if secret and _may_be_secret(value) and (numbers or not isinstance(value, int)):
        return REDACTED
    return redactor(value) if isinstance(value, str) else value


def _secrets(tree: Any, secret: bool = False) -> Iterator[str]:
    """Yield the secrets in a configuration as strings."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _secrets(item, secret or is_secret_name(key))
    elif isinstance(tree, list | tuple | set | frozenset | deque):
        for item in tree:
            yield from _secrets(item, secret)
    elif isinstance(tree, SimpleNamespace):
        yield from _secrets(vars(tree), secret)
    elif is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: getattr(tree, field.name, None) for field in fields(tree)}
        yield from _secrets({**getattr(tree, "__dict__", {}), **values}, secret)
    elif isinstance(tree, partial):
        yield from _secrets((tree.args, tree.keywords), secret)
    elif secret and _may_be_secret(tree):
        text = tree.decode(errors="replace") if isinstance(tree, bytes) else str(tree)
        yield text
        # Error messages contain the `repr` of a value.
        yield repr(tree).removeprefix("b")[1:-1] if isinstance(tree, str | bytes) else text


def _may_be_secret(value: Any) -> bool:
    # Small numbers (`pass: 2`) are options, not secrets.
    return (isinstance(value, str | bytes) and len(value) > 0) or (
        isinstance(value, int) and len(str(value)) > 5
    )


@contextmanager
def redact_errors(redactor: Redactor) -> Iterator[None]:
    """Remove secrets from the messages and notes of errors raised in the block, and from those of their causes."""
    try:
        yield
    except Exception as error:
        _redact_error(error, redactor, set())
        raise


def _redact_error(error: BaseException | None, redactor: Redactor, seen: set[int]) -> None:
    """Remove secrets from an error, its causes and the errors in a group.

    `seen` contains the ids of the errors that have already been processed.
    """
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    if (args := redactor.tree(error.args)) != error.args:
        error.args = args
    for name in ("filename", "filename2"):  # the text of an OSError contains these attributes
        if isinstance(path := getattr(error, name, None), str):
            setattr(error, name, redactor(path))
    if notes := getattr(error, "__notes__", None):
        notes[:] = [redactor(note) for note in notes]
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        _redact_error(other, redactor, seen)
