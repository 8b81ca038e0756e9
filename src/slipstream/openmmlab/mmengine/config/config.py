"""`Config` with MMEngine's additional methods, and pure Python style configurations."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from slipstream.config import Config as OwnConfig
from slipstream.config import DictAction
from slipstream.config.load import LoadedConfig
from slipstream.config.merge import DELETE, merge, nest
from slipstream.errors import ConfigError
from slipstream.openmmlab.mmengine.config.config_dict import (
    LazyConfigDict,
    as_plain,
    as_written,
    contains_lazy,
)
from slipstream.openmmlab.mmengine.config.lazy_file import is_lazy, load_lazy
from slipstream.redaction import redact

__all__ = ["Config", "read_base"]


class Config(OwnConfig):
    """Slipstream's `Config`, with MMEngine's signatures, additional methods and pure Python style configurations.

    A file that contains `with read_base():`, or imports modules outside the standard library, is a pure Python style
    configuration. The objects that the file imports become configuration values, and are imported only when they are
    read.

    Args:
        cfg_dict: the values; containers are copied.
        cfg_text: the source text of the values, if any.
        filename: the file from which the values were loaded, if any.
        env_variables, format_python_code: ignored; accepted for compatibility with MMEngine.
    """

    _imported_names: frozenset[str]

    def __init__(
        self,
        cfg_dict: Mapping[str, Any] | None = None,
        cfg_text: str | None = None,
        filename: str | Path | None = None,
        env_variables: Mapping[str, Any] | None = None,
        format_python_code: bool = True,
    ) -> None:
        object.__setattr__(self, "_imported_names", frozenset())
        super().__init__(as_plain(cfg_dict), filename=filename, cfg_text=cfg_text)

    @classmethod
    def fromfile(  # type: ignore[override]
        cls,
        filename: str | Path,
        use_predefined_variables: bool = True,
        import_custom_modules: bool = True,
        use_environment_variables: bool = True,
        lazy_import: bool | None = None,
        format_python_code: bool = True,
        *,
        trust: bool = False,
    ) -> OwnConfig:
        """Load a file; see `slipstream.config.Config.fromfile`.

        Args:
            filename: the file.
            use_predefined_variables, use_environment_variables, format_python_code: ignored; accepted for compatibility
                with MMEngine.
            import_custom_modules: import the modules listed in `custom_imports`.
            lazy_import: whether the file is a pure Python style configuration. Default: detected automatically.
            trust: whether a YAML, JSON or TOML file may execute code.

        Raises:
            ConfigError: see `slipstream.config.Config.fromfile`.
            ConfigParsingError: if a pure Python style configuration contains an import that is not supported.
        """
        path = Path(filename).expanduser()
        if lazy_import is None:
            lazy_import = path.suffix.lower() == ".py" and path.is_file() and is_lazy(_text(path), path)
        if not lazy_import:
            return super().fromfile(filename, import_custom_modules, trust=trust)
        file = load_lazy(path)
        loaded = LoadedConfig(file.values, file.text, frozenset())
        cfg = cls._from_loaded(loaded, str(filename), import_custom_modules, trust=True)
        object.__setattr__(cfg, "_imported_names", file.imported)
        return cfg

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Merge `options`, which maps dotted keys to values; see `slipstream.config.Config.merge_from_dict`."""
        if not isinstance(self._cfg_dict, LazyConfigDict):
            super().merge_from_dict(options, allow_list_keys)
            return
        merged = as_plain(self._cfg_dict)
        # Process `model._delete_` before the other keys of `model`.
        for key, value in sorted(options.items(), key=lambda item: item[0].rpartition(".")[2] != DELETE):
            merged = merge(merged, nest(key, as_plain(value)), list_keys=allow_list_keys)
        self._replace(merged)

    def to_dict(self, keep_imported: bool = False) -> dict[str, Any]:
        """Return the values as new built-in containers, with imported objects replaced by their import strings.

        Args:
            keep_imported: whether to include the names that the files import.
        """
        values: dict[str, Any] = as_written(super().to_dict())
        return values if keep_imported else self._without_imported(values)

    def redacted(self) -> dict[str, Any]:
        """Return the values without secrets or imported names; see `slipstream.config.Config.redacted`."""
        values: dict[str, Any] = redact(self._without_imported(as_written(self._cfg_dict)))
        return values

    def dump(self, file: str | Path | None = None, *, secrets: bool = False) -> str | None:
        """Write the values to `file` or return them as text; see `slipstream.config.Config.dump`.

        Imported objects are written as their import strings; the names that the files import are not written.
        """
        if not isinstance(self._cfg_dict, LazyConfigDict):
            return super().dump(file, secrets=secrets)
        written = OwnConfig(
            self._without_imported(as_written(self._cfg_dict)), filename=self._filename, cfg_text=self._text
        )
        return written.dump(file, secrets=secrets)

    def without_imported_names(self) -> Config:
        """Return a shallow copy without the names that the files import."""
        new = copy(self)
        for name in self._imported_names & set(new._cfg_dict):
            del new._cfg_dict[name]
        object.__setattr__(new, "_imported_names", frozenset())
        return new

    def _without_imported(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in self._imported_names}

    def _replace(self, values: Mapping[str, Any]) -> None:
        plain = as_plain(values)
        super()._replace(plain)
        if contains_lazy(plain):
            object.__setattr__(self, "_cfg_dict", LazyConfigDict(plain))

    @staticmethod
    def diff(cfg1: str | Path | OwnConfig, cfg2: str | Path | OwnConfig) -> str:
        """Return a line-by-line diff of two configurations or configuration files."""
        first, second = (c if isinstance(c, OwnConfig) else Config.fromfile(c) for c in (cfg1, cfg2))
        return "\n".join(difflib.ndiff(first.pretty_text.split("\n"), second.pretty_text.split("\n")))

    @staticmethod
    def auto_argparser(description: str | None = None) -> tuple[ArgumentParser, OwnConfig]:
        """Read the configuration file specified in `sys.argv`.

        Returns:
            A parser with an option for each bool, number, string and list in the configuration, and the configuration.
        """
        parser = ArgumentParser(description=description)
        parser.add_argument("config", help="configuration file")
        known: Namespace = parser.parse_known_args()[0]
        cfg = Config.fromfile(known.config)
        for name, value in _leaves(cfg, ""):
            if isinstance(value, bool):
                parser.add_argument(f"--{name}", action="store_true")
            elif isinstance(value, int | float | str):
                parser.add_argument(f"--{name}", type=type(value))
            elif isinstance(value, list | tuple):
                parser.add_argument(f"--{name}", nargs="+")
        parser.add_argument("--cfg-options", nargs="+", action=DictAction)
        return parser, cfg


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; check the path and the encoding (UTF-8)"
        ) from None


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def read_base() -> Iterator[None]:
    """Mark the imports of base files in a pure Python style configuration; `Config.fromfile` loads these files."""
    yield
