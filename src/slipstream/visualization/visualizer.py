"""A visualizer that passes scalars, images and the configuration to all backends of a run."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import BackendError, ConfigError, SlipstreamError, UnknownNameError, did_you_mean
from slipstream.registry import VISBACKENDS, VISUALIZERS
from slipstream.typecheck import short_repr
from slipstream.visualization.backends import BaseVisBackend

if TYPE_CHECKING:
    import numpy.typing as npt


@VISUALIZERS.register_module()
class Visualizer:
    """Pass every call to all visualization backends of a run.

    Args:
        name: name of the run.
        vis_backends: a backend or its configuration (`dict(type="LocalVisBackend")`, with an optional `name`), or
            a list of them.
        save_dir: parent folder of `vis_data`, the default `save_dir` of backends.

    Raises:
        ConfigError: if a value is not a backend, two backends have the same name, or a config has no `save_dir`.
    """

    def __init__(
        self,
        name: str = "visualizer",
        vis_backends: list[Any] | dict[str, Any] | BaseVisBackend | None = None,
        save_dir: str | Path | None = None,
    ) -> None:
        self.name = name
        self._backends: dict[str, Any] = {}
        self._failed: set[str] = set()
        backends = vis_backends if isinstance(vis_backends, list | tuple) else [vis_backends]
        for index, backend in enumerate(backends):
            if backend is not None:
                self._add_backend(backend, save_dir, f"vis_backends[{index}]")

    def _add_backend(self, backend: Any, save_dir: str | Path | None, path: str) -> None:
        name = type(backend).__name__
        if isinstance(backend, Mapping):
            if save_dir is None and "save_dir" not in backend:
                raise ConfigError("requires a save_dir; set it here or in the Visualizer", path)
            cfg = {key: value for key, value in backend.items() if key != "name"}
            defaults = {} if save_dir is None else {"save_dir": str(Path(save_dir) / "vis_data")}
            built = VISBACKENDS.build(cfg, default_args=defaults)
            name, backend = backend.get("name", type(built).__name__), built
        if not hasattr(backend, "add_scalar"):
            raise ConfigError(f"must be a backend or a dict with a 'type', not {short_repr(backend)}", path)
        if name in self._backends:
            raise ConfigError(
                f"two backends have the name '{name}'; set a different 'name' for one of them", path
            )
        self._backends[name] = backend

    def get_backend(self, name: str) -> Any:
        """Return the backend with this name. By default, a backend is named after its class.

        Raises:
            UnknownNameError: if no backend has this name.
        """
        if name not in self._backends:
            hint = did_you_mean(name, self._backends)
            raise UnknownNameError(
                f"unknown backend '{name}'{hint}; available backends: {list(self._backends)}"
            )
        return self._backends[name]

    def add_config(self, config: Any) -> None:
        """Record the configuration, a `Config` or a dict.

        Raises:
            ConfigError: a backend cannot write this configuration.
            BackendError: a backend failed, for example because its server cannot be reached.
        """
        for name, backend in self._backends.items():
            try:
                backend.add_config(config)
            except SlipstreamError:
                raise
            except Exception as error:
                raise BackendError(
                    f"visualizer.vis_backends: {name} cannot record the configuration: {type(error).__name__}: "
                    f"{error}. Check the free space and the options of this backend, or remove it"
                ) from error

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        """Record a scalar."""
        self._call("add_scalar", name, value, step)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Record several scalars for one step; `LocalVisBackend` also writes them to `file_path`."""
        self._call("add_scalars", scalar_dict, step, file_path)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Record an RGB image, uint8 (H, W, 3).

        Raises:
            DataError: if `image` has a different type or shape.
        """
        self._call("add_image", name, image, step)

    def continue_run(self, log_dir: Path, earlier: Path, time: float) -> None:
        """Continue the curves of an earlier run, up to `time`; see `TensorboardVisBackend.continue_run`."""
        self._call("continue_run", log_dir, earlier, time)

    def flush(self) -> None:
        """Flush every backend."""
        self._call("flush")

    def end_run(self, failed: bool) -> None:
        """Flush every backend, and mark the run as finished or failed. The Runner calls this method after each run."""
        self.flush()
        self._call("end_run", failed)

    def close(self) -> None:
        """Close every backend."""
        self._call("close")

    def _call(self, method: str, *args: Any) -> None:
        """Call a method of each backend; log one warning for each backend that fails, and let the run continue."""
        for name, backend in self._backends.items():
            try:
                getattr(backend, method, lambda *_: None)(*args)
            except SlipstreamError:
                raise
            except Exception as error:  # any library may write the log
                if name not in self._failed:
                    # Imported here, because slipstream.logging imports torch.
                    from slipstream.logging import print_log

                    self._failed.add(name)
                    message = (
                        f"{name} cannot record values ({type(error).__name__}: {error}); training continues"
                    )
                    print_log(message, "current", WARNING)
