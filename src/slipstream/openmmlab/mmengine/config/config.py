"""`Config` with MMEngine's additional methods."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.config import Config as OwnConfig
from slipstream.config import DictAction

__all__ = ["Config", "read_base"]


class Config(OwnConfig):
    """Slipstream's `Config`, with MMEngine's signatures and additional methods."""

    @classmethod
    def fromfile(  # type: ignore[override]
        cls,
        filename: str | Path,
        use_predefined_variables: bool = True,
        import_custom_modules: bool = True,
        use_environment_variables: bool = True,
        lazy_import: bool | None = None,
        format_python_code: bool = True,
        **kwargs: Any,
    ) -> OwnConfig:
        """Load a file; see `slipstream.config.Config.fromfile`. The other arguments are accepted and ignored."""
        return super().fromfile(filename, import_custom_modules, **kwargs)

    @staticmethod
    def diff(cfg1: str | Path | OwnConfig, cfg2: str | Path | OwnConfig) -> str:
        """Return the differences of two configurations, or configuration files, line by line."""
        first, second = (c if isinstance(c, OwnConfig) else OwnConfig.fromfile(c) for c in (cfg1, cfg2))
        return "\n".join(difflib.ndiff(first.pretty_text.split("\n"), second.pretty_text.split("\n")))

    @staticmethod
    def auto_argparser(description: str | None = None) -> tuple[ArgumentParser, OwnConfig]:
        """Return a parser with an option for each value of the configuration file in `sys.argv`, and this file."""
        parser = ArgumentParser(description=description)
        parser.add_argument("config", help="configuration file")
        known: Namespace = parser.parse_known_args()[0]
        cfg = OwnConfig.fromfile(known.config)
        for name, value in _leaves(cfg, ""):
            if isinstance(value, bool):
                parser.add_argument(f"--{name}", action="store_true")
            elif isinstance(value, int | float | str):
                parser.add_argument(f"--{name}", type=type(value))
            elif isinstance(value, list | tuple):
                parser.add_argument(f"--{name}", nargs="+")
        parser.add_argument("--cfg-options", nargs="+", action=DictAction)
        return parser, cfg


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def read_base() -> Iterator[None]:
    """Mark the imports of base files in a configuration. `Config.fromfile` does not support such files."""
    yield
