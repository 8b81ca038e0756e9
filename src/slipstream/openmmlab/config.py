"""Read MMEngine's configurations, and convert them to Slipstream's."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mmengine
from mmengine.config.lazy import LazyAttr, LazyObject

from slipstream.checkpoint import stored_config
from slipstream.config import Config
from slipstream.errors import CheckpointError, ConfigError

__all__ = ["load_config", "own_config", "saved_config"]


def load_config(path: str | Path, *, trust: bool = False) -> Config:
    """Load a configuration file, including pure Python style configurations (`with read_base():`).

    Raises:
        ConfigError: see `Config.fromfile`.
    """
    path = Path(path).expanduser()
    if path.suffix == ".py" and path.is_file() and mmengine.Config._is_lazy_import(str(path)):
        return own_config(mmengine.Config.fromfile(path))
    return Config.fromfile(path, trust=trust)


def own_config(cfg: Any) -> Any:
    """Convert MMEngine's `Config` to Slipstream's. Objects of lazy imports are imported. Return other values as is."""
    if not isinstance(cfg, mmengine.Config):
        return cfg
    imported = getattr(cfg, "_imported_names", ())
    values = {key: value for key, value in dict.items(cfg._cfg_dict) if key not in imported}
    return Config(_imported(values), filename=cfg.filename, cfg_text=cfg.text)


def _imported(value: Any) -> Any:
    """Replace the lazy objects in nested containers with the objects that they refer to."""
    if isinstance(value, dict):
        return {key: _imported(item) for key, item in dict.items(value)}
    if type(value) in (list, tuple):
        return type(value)(_imported(item) for item in value)
    return value.build() if isinstance(value, LazyObject | LazyAttr) else value


def saved_config(checkpoint: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration in a checkpoint.

    Slipstream stores a configuration as YAML text, and MMEngine as Python text. Python text may contain only
    assignments of built-in values, because reading a checkpoint must not execute code.

    Raises:
        CheckpointError: if the checkpoint does not contain a configuration, or the configuration contains other code.
    """
    content = checkpoint or {}
    hub: Any = content.get("message_hub") or {}
    text = (hub.get("runtime_info") or {}).get("cfg") or (content.get("meta") or {}).get("cfg")
    if not isinstance(text, str):
        raise CheckpointError(
            "the checkpoint does not contain a configuration; pass the configuration file as the `model` argument"
        )
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    try:
        if body and all(isinstance(node, ast.Assign) for node in body):
            return {_name(node): _value(node.value) for node in body if isinstance(node, ast.Assign)}
    except (ConfigError, RecursionError) as error:
        raise CheckpointError(
            f"the configuration in the checkpoint cannot be read: {error}; pass the configuration file as the "
            "`model` argument"
        ) from None
    if not (values := stored_config({"cfg": text})):
        raise CheckpointError(
            "the configuration in the checkpoint cannot be read, because it is neither YAML nor Python with "
            "built-in values; pass the configuration file as the `model` argument"
        )
    return values


def _name(node: ast.Assign) -> str:
    target = node.targets[0]
    if len(node.targets) > 1 or not isinstance(target, ast.Name):
        raise ConfigError(f"line {node.lineno} is not an assignment to a single name")
    return target.id


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "dict" and not node.args and all(k.arg for k in node.keywords):
            return {str(k.arg): _value(k.value) for k in node.keywords}
        if node.func.id == "float" and len(node.args) == 1 and not node.keywords:
            return float(ast.literal_eval(node.args[0]))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(
            f"line {node.lineno} contains '{ast.unparse(node)[:80]}', which is not a built-in value"
        ) from None
