"""Find the configuration values that a Python file computes from its variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from slipstream.errors import ConfigError

__all__ = ["check_variable", "variable_uses"]

_MAX_LISTED = 4
"""Maximum number of keys in an error message."""


def variable_uses(module: ast.Module, base: str) -> dict[str, list[str]]:
    """Return, for each variable that the module reads, the dotted keys of the values that are computed from it.

    Args:
        module: the parsed file.
        base: the name `_base_`, whose attributes are the values of the base files.
    """
    uses: dict[str, list[str]] = {}
    for statement in module.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        target = statement.target if isinstance(statement, ast.AnnAssign) else target
        key = target.id if isinstance(target, ast.Name) else ""
        value = getattr(statement, "value", None)
        for name, path in _reads(value if key and value is not None else statement, key, base):
            if path != name:
                uses.setdefault(name, []).append(path)
    return uses


def _reads(node: ast.AST, path: str, base: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each variable that `node` reads, and the dotted key of the value that uses it."""
    items = _items(node) if path else {}
    for key, value in items.items():
        yield from _reads(value, f"{path}.{key}", base)
    if items:
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id, path
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == base:
            yield part.attr, path


def _items(node: ast.AST) -> dict[str, ast.AST]:
    """Return the items of a dict or list literal, keyed by key or index, or an empty dict for other expressions."""
    if isinstance(node, ast.List | ast.Tuple):
        starred = any(isinstance(item, ast.Starred) for item in node.elts)
        return {} if starred else {str(index): item for index, item in enumerate(node.elts)}
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
        constant = all(isinstance(key, ast.Constant) for key, _ in pairs)
        return (
            {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            if constant
            else {}
        )
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dict"
        and not node.args
    ):
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        return {key: value for key, value in named.items() if key} if None not in named else {}
    return {}


def check_variable(key: str, uses: Mapping[str, Sequence[str]], source: str) -> None:
    """Check that the first segment of the dotted `key` is not a variable from which other values were computed.

    Args:
        key: key of an override.
        uses: the keys whose values use each variable; see `variable_uses`.
        source: the configuration file, for the error message.

    Raises:
        ConfigError: an override of the variable would have no effect.
    """
    name = key.split(".")[0]
    if name not in uses:
        return
    keys = list(dict.fromkeys(path for path in uses[name] if path))
    listed = ", ".join(keys[:_MAX_LISTED]) + (", ..." if len(keys) > _MAX_LISTED else "")
    remedy = f"override the keys that use it instead: {listed}" if keys else f"change it in {source}"
    raise ConfigError(
        f"'{name}' is a variable of {source}, and the values that use it were computed when the file was loaded, so "
        f"the override would have no effect; {remedy}",
        key,
    )
