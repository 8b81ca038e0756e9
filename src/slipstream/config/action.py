"""An argparse action for configuration overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slipstream.config.override import parse_override
from slipstream.errors import ConfigError

__all__ = ["DictAction"]


class DictAction(argparse.Action):
    """Collect `--cfg-options key=value key.subkey=value ...` into a dict that maps dotted keys to typed values.

    `Config.merge_from_dict` accepts this dict. See `parse_override` for the supported value types. The option can be
    repeated.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Add the overrides from one occurrence of the option to `namespace`."""
        texts = [values] if isinstance(values, str) else values or []
        try:
            parsed = dict(parse_override(text) for text in texts)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), **parsed})
