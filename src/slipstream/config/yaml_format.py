"""YAML loader and dumper for configurations: `1e-3` is a number; `12:30` and `2024-01-01` are strings."""

from __future__ import annotations

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0|[1-9][0-9]*(?:_[0-9]+)*)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_NUMBER_START = list("-+.0123456789")
# YAML 1.1 parses 12:30 as 750, 017 as 15 and 2024-01-01 as a date, unlike the other formats.
_REPLACED_TAGS = {_TAG + name for name in ("int", "float", "timestamp", "value")}


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that it parses `1e-3` as a number, and `12:30`, `017` and dates as strings.

    Duplicate keys raise an error.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it this way
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node for a mapping.

        Raises:
            yaml.constructor.ConstructorError: the mapping has a duplicate key.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _TAG + "merge":
                if (key.tag, key.value) in seen:
                    problem = f"duplicate key '{key.value}'"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, key.value))
        return node


class Dumper(yaml.SafeDumper):
    """A safe dumper that quotes strings that `Loader` or another YAML parser would convert to a different type."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # YAML 1.1 treats these characters as line breaks; they can only be escaped in double-quoted strings.
    style = '"' if any(char in text for char in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(_TAG + "str", text, style)


Dumper.add_representer(str, _represent_str)
Loader.add_implicit_resolver(_TAG + "int", _INT, _NUMBER_START)
Loader.add_implicit_resolver(_TAG + "float", _FLOAT, _NUMBER_START)
Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, _NUMBER_START)


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: a bool, an int, a float, None, or `text` unchanged."""
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag not in (_TAG + "bool", _TAG + "int", _TAG + "float", _TAG + "null"):
        return text
    return loader.construct_object(yaml.ScalarNode(tag, text))
