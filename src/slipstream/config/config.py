"""`Config`, the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from pathlib import Path
from typing import Any

from slipstream.config.config_dict import ConfigDict
from slipstream.config.load import LoadedConfig, import_custom, load_file, load_text
from slipstream.config.merge import DELETE, merge, nest
from slipstream.config.override import check_override, parse_override
from slipstream.config.write import to_text
from slipstream.errors import ConfigError
from slipstream.redaction import redact

# MMEngine reserves `env_variables` and cannot load a file with this key.
_RESERVED = ("filename", "text", "pretty_text", "env_variables")


class Config(MutableMapping[str, Any]):
    """A configuration, as a mapping with attribute access at every level. It also stores the name and text of its file.

    A `.py` file is executed, so load only files that you trust. YAML, JSON and TOML files, their placeholders, and
    overrides are parsed as data and are never evaluated. With `trust=True`, however, such a file may import any module
    and may have a `.py` file as a base (see `fromfile`).

    Args:
        cfg_dict: the values; containers are copied.
        filename: the file from which the values were loaded, if any.
        cfg_text: the source text of the values, if any.

    Raises:
        ConfigError: a top-level key is reserved (`filename`, `text`, `pretty_text`, `env_variables`,
            `_base_`, dunder names) or is not a string.

    Example:
        >>> cfg = Config.fromfile("configs/unet.py")
        >>> cfg.optim_wrapper.optimizer.lr = 0.1
        >>> cfg.merge_from_dict({"train_cfg.max_epochs": 10})
    """

    _cfg_dict: ConfigDict
    _filename: str | None
    _text: str
    _variables: frozenset[str]

    def __init__(
        self,
        cfg_dict: Mapping[str, Any] | None = None,
        *,
        filename: str | Path | None = None,
        cfg_text: str | None = None,
    ) -> None:
        if cfg_dict is not None and not isinstance(cfg_dict, Mapping):
            raise ConfigError(f"cfg_dict must be a dict, got {type(cfg_dict).__name__}")
        object.__setattr__(self, "_filename", None if filename is None else str(filename))
        object.__setattr__(self, "_text", cfg_text or "")
        object.__setattr__(self, "_variables", frozenset())
        self._replace(merge({}, cfg_dict or {}))

    @classmethod
    def fromfile(
        cls, filename: str | Path, import_custom_modules: bool = True, *, trust: bool = False
    ) -> Config:
        """Load a `.py`, `.yaml`, `.yml`, `.json` or `.toml` file.

        The `_base_` key lists the base files, in any of these formats, whose values this file overrides. Their paths
        are relative to this file or, in the form `"mmdet::retinanet/NAME.py"`, to the `.mim/configs` folder of an
        installed library. Dicts are merged, unless they contain `_delete_=True`; all other values are replaced.

        The placeholders `{{ fileDirname }}`, `{{ fileBasename }}`, `{{ fileBasenameNoExtension }}`,
        `{{ fileExtname }}`, `{{ _base_.key.subkey }}` and `{{$VARIABLE:default}}` (from the environment) are replaced
        with their values.

        Only `.py` files are executed. Their top-level variables, except modules, functions, classes and dunder names,
        become the keys. Their expressions can refer to a value from a base as `_base_.key.subkey`.

        Args:
            filename: path of the file.
            import_custom_modules: whether to import the modules listed in `custom_imports=dict(imports=[...])`. This
                applies to files of any format. Importing a module executes its code.
            trust: whether a YAML, JSON or TOML file may execute code by importing any module through `custom_imports`
                or by using a `.py` file as a base. By default, only modules that the program has already imported and
                modules from slipstream, torch and torchmetrics may be imported. `.py` files are always trusted.

        Raises:
            ConfigError: a file is missing, has a syntax error or raises an error; a base is missing or circular, or
                two bases set the same key; a dict would be merged into a value of a different type; or a YAML, JSON
                or TOML file requires `trust` to execute code. The message names the file and, if known, the
                line.
        """
        path = Path(filename).expanduser()
        trust = trust or path.suffix.lower() == ".py"
        loaded = load_file(path, trust=trust)
        return cls._from_loaded(loaded, str(filename), import_custom_modules, trust)

    @classmethod
    def fromstring(cls, cfg_str: str, file_format: str, *, trust: bool = False) -> Config:
        """Load text in the format `".py"`, `".yaml"`, `".yml"`, `".json"` or `".toml"`.

        Paths of bases are relative to the working directory. The modules in `custom_imports` are imported. Only `.py`
        text is executed. See `fromfile` for `trust`.

        Raises:
            ConfigError: see `fromfile`; the file name in messages is `<string>`.
        """
        suffix = "." + file_format.removeprefix(".").lower()
        trust = trust or suffix == ".py"
        return cls._from_loaded(load_text(cfg_str, Path("<string>"), suffix, trust=trust), None, True, trust)

    @classmethod
    def _from_loaded(
        cls, loaded: LoadedConfig, filename: str | None, import_custom_modules: bool, trust: bool
    ) -> Config:
        if import_custom_modules:
            import_custom(loaded.values, filename or "<string>", trust)
        try:
            cfg = cls(loaded.values, filename=filename, cfg_text=loaded.text)
        except ConfigError as error:
            raise ConfigError(f"{error.args[0]} ({filename or '<string>'})", error.path) from None
        object.__setattr__(cfg, "_variables", loaded.variables)
        return cfg

    @property
    def filename(self) -> str | None:
        """The path of the loaded file, as passed to `fromfile`."""
        return self._filename

    @property
    def text(self) -> str:
        """The source text of every file that was loaded, bases first, each preceded by its path."""
        return self._text

    @property
    def pretty_text(self) -> str:
        """The values as Python source that `fromfile` can load.

        Classes, functions and objects such as `torch.bfloat16` are written as dotted import strings. Secrets are
        replaced; see `redacted`.

        Raises:
            ConfigError: a value cannot be written; the message names its key.
        """
        return to_text(self.redacted(), ".py")

    def redacted(self) -> dict[str, Any]:
        """Return the values without secrets, for files and logs.

        A string from an environment variable is replaced by a reference (`{{ $NAME }}`), which can be loaded again.
        Values of keys such as `api_key` and `password` are replaced by `<redacted>`.
        """
        return redact(self._cfg_dict)

    def dump(self, file: str | Path | None = None, *, secrets: bool = False) -> str | None:
        """Write the values to `file` in the format specified by its suffix, or return them as text if `file` is None.

        The returned text has the format of `filename`, or is Python source if `filename` is None. Loading the output
        restores the same configuration, except for secrets (see `secrets`) and for these types: classes, functions and
        objects such as `torch.bfloat16` become dotted import strings, paths become strings, NumPy numbers become Python
        numbers, and tuples become lists in YAML, JSON and TOML. TOML requires the `slipstream[toml]` extra.

        Args:
            file: path of the file to write.
            secrets: whether to write secrets as they are, instead of environment variable references or `<redacted>`.

        Raises:
            ConfigError: the format does not support a value (such as None in TOML); the message names its key.
        """
        suffix = Path(file or self._filename or ".py").suffix.lower() or ".py"
        text = to_text(self._cfg_dict if secrets else self.redacted(), suffix)
        if file is None:
            return text
        Path(file).write_text(text, encoding="utf-8", newline="\n")
        return None

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Merge `options`, a mapping of dotted keys to values, into this configuration in order, `_delete_` keys first.

        Args:
            options: for example, `{"model.depth": 3, "model": dict(width=8)}`. A dict is merged into the existing
                value, unless it has `_delete_=True` (or the options contain `"model._delete_": True`).
            allow_list_keys: whether integers in keys (as in `"pipeline.0.type"`) are list indices.

        Raises:
            ConfigError: a dict and a value of a different type cannot be merged, or a list item does not exist. If an
                error is raised, the configuration is unchanged.
        """
        merged: dict[str, Any] = self._cfg_dict
        for key, value in sorted(options.items(), key=_deletes_first):
            merged = merge(merged, nest(key, value), list_keys=allow_list_keys)
        self._replace(merged)

    def override(
        self, overrides: Iterable[str], known: Iterable[str] = (), hints: Mapping[str, str] | None = None
    ) -> None:
        """Merge overrides into this configuration and raise an error for unknown keys.

        Args:
            overrides: `["optim_wrapper.optimizer.lr=0.1", ...]`; see `parse_override`.
            known: the keys that the program reads, which may be set even if the configuration does not contain them:
                top-level keys, dotted keys, and `section.*` for all keys of a section.
            hints: other valid names, such as shortcuts and their synonyms, mapped to the names that errors suggest.

        Raises:
            UnknownNameError: a key is not in the configuration. Empty dicts and dicts with a `type` accept new keys,
                which are checked when the object is built. The message names the config path and the nearest
                valid key.
            ConfigError: an override cannot be parsed or merged; or a key that is not in `known` is a variable of a
                Python file from which other values were computed, so the override would have no effect (if `known` is
                empty, this is not checked). If an error is raised, the configuration is unchanged.
        """
        known = set(known)
        source = self._filename or "the configuration"
        changed = copy(self)
        for key, value in sorted(map(parse_override, overrides), key=_deletes_first):
            check_override(changed._cfg_dict, key, known, source, hints)
            if known and key.split(".")[0] in self._variables - known:
                raise ConfigError(
                    f"this is a variable of {source}; the values that use it were computed when the file was loaded, "
                    "so override these values instead",
                    key,
                )
            changed.merge_from_dict({key: value})
        self._replace(changed._cfg_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as new built-in dicts, lists and tuples."""
        return self._cfg_dict.to_dict()

    def copy(self) -> Config:
        """Return a shallow copy, which shares nested dicts. Use `copy.deepcopy` for a deep copy."""
        return copy(self)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, after setting it to `default` if the key is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def _replace(self, values: Mapping[str, Any]) -> None:
        for key in values:
            _check_key(key)
        object.__setattr__(self, "_cfg_dict", ConfigDict(values))

    def __copy__(self) -> Config:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, _cfg_dict=self._cfg_dict.copy())
        return new

    def __getattr__(self, name: str) -> Any:
        # pickle and copy access attributes before the fields are set.
        if name == "_cfg_dict" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._cfg_dict, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._cfg_dict, name)

    def __getitem__(self, key: str) -> Any:
        return self._cfg_dict[key]

    def __setitem__(self, key: str, value: Any) -> None:
        _check_key(key)
        self._cfg_dict[key] = value

    def __delitem__(self, key: str) -> None:
        del self._cfg_dict[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cfg_dict)

    def __len__(self) -> int:
        return len(self._cfg_dict)

    def __repr__(self) -> str:
        return f"Config (path: {self._filename}): {self.redacted()}"


def config_text(cfg: Config, file_format: str = "yaml") -> str:
    """Return the configuration as text without secrets, or a comment with the reason if a value cannot be written."""
    import yaml

    try:
        return (
            cfg.pretty_text if file_format == "py" else yaml.safe_dump(json.loads(json.dumps(cfg.redacted())))
        )
    except (ConfigError, TypeError, ValueError) as error:
        return f"# This configuration contains objects that cannot be written as text: {error}\n"


def _deletes_first(item: tuple[str, Any]) -> bool:
    """Return a sort key that puts `model._delete_` before the other keys of `model`."""
    return item[0].rpartition(".")[2] != DELETE


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"top-level keys must be strings, got {key!r}")
    if key in _RESERVED or key == "_base_" or (key.startswith("__") and key.endswith("__")):
        raise ConfigError("this name is reserved by Config; use a different key", key)
