"""Remove secrets from a configuration before it is written to a file, a log or a tracking service.

Secrets are the values of environment variables and of configuration keys whose names indicate a secret
(`WANDB_API_KEY`, `password`), and strings in known token formats (`ghp_...`).
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

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


def is_secret_name(name: Any) -> bool:
    """Return whether the name of a key or an environment variable indicates that its value is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()
    return _NAME.search(words) is not None and _VOCABULARY.search(words) is None


def redact(tree: Any) -> Any:
    """Return a copy of `tree` (nested dicts, lists, tuples, sets and arguments of partials) without secrets.

    The value of an environment variable with a secret name is replaced by a placeholder (`{{ $NAME }}`), which
    `Config.fromfile` can read; a value under a key with a secret name, and a known token, by `<redacted>`.
    """
    variables = {
        value: f"{{{{ ${name} }}}}"
        for name, value in os.environ.items()
        if len(value) >= _MIN_LENGTH and is_secret_name(name) and name != "PWD"  # the working directory
    }
    return _redact(tree, variables, secret=False)


def _redact(value: Any, variables: dict[str, str], secret: bool) -> Any:
    """Return `value` without secrets; `secret` is True if the name of a key that contains it indicates a secret."""
    if isinstance(value, dict):
        return {key: _redact(item, variables, secret or is_secret_name(key)) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_redact(item, variables, secret) for item in value)
    if isinstance(value, partial):
        args, keywords = (_redact(part, variables, secret) for part in (value.args, value.keywords))
        return partial(value.func, *args, **keywords)
    if isinstance(value, str):
        text = value
        for variable in sorted(variables, key=len, reverse=True):  # a secret may be part of a longer secret
            text = text.replace(variable, variables[variable])
        is_unchanged = secret and value and text == value
        return REDACTED if is_unchanged else _TOKEN.sub(REDACTED, text)
    # Small numbers (`pass: 2`) are options, not secrets.
    is_secret_number = isinstance(value, int) and len(str(value)) > 5
    return REDACTED if secret and (is_secret_number or isinstance(value, bytes)) else value
