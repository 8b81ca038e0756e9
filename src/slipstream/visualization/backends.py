"""Visualization backends that write files: JSON lines, CSV, images and TensorBoard events."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from slipstream.errors import ConfigError
from slipstream.extras import extra, is_installed
from slipstream.files import atomic_write, check_name
from slipstream.registry import VISBACKENDS
from slipstream.visualization.values import as_json, as_text, check_image, scalars_in

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.utils.tensorboard import SummaryWriter

_SAVE_DIR = "the backend's save_dir"
_EVENT_FILES = "events.out.tfevents.*"


def default_backends() -> list[dict[str, str]]:
    """Return the configurations of the file backends, including the TensorBoard backend if TensorBoard is installed."""
    names = ["LocalVisBackend", *(["TensorboardVisBackend"] if is_installed("tensorboard") else [])]
    return [{"type": name} for name in names]


class BaseVisBackend:
    """Base class for visualization backends.

    Subclasses override the methods they support. The other methods do nothing.

    Args:
        save_dir: folder for the backend's files.
    """

    def __init__(self, save_dir: str | Path) -> None:
        self.save_dir = Path(save_dir)

    @property
    def experiment(self) -> Any:
        """The backend's writer or client, which is created on first use. The default is the backend itself."""
        return self

    def add_config(self, config: Any) -> None:
        """Record the configuration, a `Config` or a dict."""

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        """Record a scalar: a number, or a 0-dim array or tensor. Subclasses override this method or `add_scalars`."""
        if type(self).add_scalars is not BaseVisBackend.add_scalars:
            self.add_scalars({name: value}, step)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Record several scalars for one step; `LocalVisBackend` also writes them to `file_path`."""
        for name, value in scalar_dict.items():
            self.add_scalar(name, value, step)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Record an RGB image, uint8 (H, W, 3)."""

    def flush(self) -> None:
        """Write buffered data. The backend can still be used afterwards."""

    def close(self) -> None:
        """Write buffered data and close files and connections."""


@VISBACKENDS.register_module()
class LocalVisBackend(BaseVisBackend):
    """Write files to `save_dir`: the configuration, one JSON line per set of scalars, and PNG images.

    Args:
        save_dir: the output folder.
        img_save_dir: the folder for images, relative to `save_dir`.
        config_save_file: file name of the configuration, ending in `.py`.
        scalar_save_file: file name of the scalars, ending in `.json`.

    Raises:
        ConfigError: if a file name has a different suffix, or a path is not inside `save_dir`.
    """

    def __init__(
        self,
        save_dir: str | Path,
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir)
        self.img_save_dir = self.save_dir / check_name(img_save_dir, "img_save_dir", _SAVE_DIR)
        self.config_save_file = self.save_dir / _with_suffix(config_save_file, ".py", "config_save_file")
        self.scalar_save_file = _with_suffix(scalar_save_file, ".json", "scalar_save_file")
        self._files: dict[str, TextIO] = {}

    def add_config(self, config: Any) -> None:
        """Write the configuration in Python syntax."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.config_save_file.write_text(as_text(config) + "\n", encoding="utf-8")

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Append a JSON line with the values and `step` to the scalars file and, if set, to `save_dir/file_path`."""
        line = as_json({"step": step, **scalar_dict}) + "\n"
        self._append(self.scalar_save_file, line)
        if file_path is not None:
            self._append(file_path, line)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Write `<img_save_dir>/<name>_<step>.png`."""
        with extra("images"):
            from PIL import Image

        path = self.img_save_dir / check_name(f"{name}_{step}.png", "name", _SAVE_DIR)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(check_image(name, image)).save(path)

    def close(self) -> None:
        """Close the files. Scalars recorded later reopen them."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, line: str) -> None:
        try:
            self._file(name).write(line)
        except OSError:
            with contextlib.suppress(OSError, KeyError):
                self._files.pop(name).close()  # a later line opens the file again
            raise

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self.save_dir / _with_suffix(name, ".json", "file_path")
            self.save_dir.mkdir(parents=True, exist_ok=True)
            # Line buffering keeps the file complete up to the last line, even if the run is killed.
            self._files[name] = path.open("a", buffering=1, encoding="utf-8")
        return self._files[name]


@VISBACKENDS.register_module()
class TensorboardVisBackend(BaseVisBackend):
    """Write TensorBoard event files to `save_dir`; values that are not numbers are skipped."""

    @cached_property
    def experiment(self) -> SummaryWriter:
        """The `torch.utils.tensorboard.SummaryWriter`."""
        with extra("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.save_dir))

    def add_config(self, config: Any) -> None:
        """Write the configuration as a text summary named `config`."""
        # Four spaces mark a code block in TensorBoard's Markdown.
        self.experiment.add_text("config", "\n".join(f"    {line}" for line in as_text(config).splitlines()))

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write a point of each curve in a single event; `SummaryWriter.add_scalar` would write an event per curve."""
        writer = self.experiment  # reports a missing package before the import below
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=number) for name, number in scalars_in(scalar_dict).items()
        ]
        if values:
            writer._get_file_writer().add_summary(Summary(value=values), step)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Write an image summary."""
        self.experiment.add_image(name, check_image(name, image), step, dataformats="HWC")

    def continue_run(self, log_dir: Path, earlier: Path, time: float) -> None:
        """Continue the event files of an earlier run, so that TensorBoard shows a single run without repeated steps.

        Args:
            log_dir, earlier: the log folders of this run and of the earlier run.
            time: events that the earlier run wrote after this time are removed.
        """
        folder = self.save_dir
        if folder.is_relative_to(log_dir):
            folder = earlier / folder.relative_to(log_dir)
        if not (files := [*folder.glob(_EVENT_FILES)]):
            return
        self.close()
        self.__dict__.pop("experiment", None)
        for file in files:
            _remove_events(file, time)
        for file in self.save_dir.glob(_EVENT_FILES):
            file.replace(folder / file.name)
        self.save_dir = folder

    def flush(self) -> None:
        """Write the queued events to the event file."""
        if "experiment" in self.__dict__:
            self.experiment.flush()

    def close(self) -> None:
        """Flush and close the event file, if it was created."""
        if "experiment" in self.__dict__:
            self.experiment.close()


def _remove_events(path: Path, time: float) -> None:
    """Remove the events after `time` from an event file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = [(record, Event.FromString(record)) for record in RawEventFileLoader(str(path)).Load()]
    kept = [record for record, event in records if event.wall_time <= time or event.file_version]
    if len(kept) < len(records):
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            for record in kept:
                RecordWriter(file).write(record)


def _with_suffix(name: str, suffix: str, path: str) -> str:
    if not name.endswith(suffix):
        raise ConfigError(f"must end in {suffix}, not {name!r}", path)
    return check_name(name, path, _SAVE_DIR)
