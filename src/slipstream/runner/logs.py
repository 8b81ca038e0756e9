"""Create a run's name, log folder, logger, message hub and visualizer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import Config, add_config_path, config_text
from slipstream.dist import broadcast_object_list, get_rank, is_main_process
from slipstream.errors import ConfigError
from slipstream.extras import is_installed
from slipstream.files import write_text
from slipstream.logging import MessageHub, Meter, MMLogger, build_logger
from slipstream.registry import LOG_PROCESSORS, VISUALIZERS
from slipstream.runner.environment import collect_env
from slipstream.runner.log_processor import LogProcessor
from slipstream.visualization import Visualizer, default_backends


class Logs(NamedTuple):
    """The start time and the experiment name of a run, its log folder, and its logging objects."""

    timestamp: str
    experiment: str
    log_dir: Path
    logger: MMLogger
    hub: MessageHub
    meter: Meter
    processor: LogProcessor
    visualizer: Visualizer


def _create_folder(work_dir: Path, stamp: str) -> str:
    """Create the folder `stamp`, with a numeric suffix if another run started in the same second; return its name."""
    for number in itertools.count():
        name = f"{stamp}_{number}" if number else stamp
        try:
            (work_dir / name).mkdir(parents=True)
            return name
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"cannot create a folder in {work_dir}: {error.strerror}; choose a different folder",
                "work_dir",
            ) from error
    raise AssertionError


def build_visualizer(cfg: Mapping[str, Any], name: str, save_dir: str | Path) -> Any:
    """Build a run's visualizer from its configuration; `name` and `save_dir` are defaults."""
    defaults = {"type": "Visualizer", "name": name, "save_dir": str(save_dir)}
    with add_config_path({}, "visualizer"):
        return VISUALIZERS.build(dict(cfg), default_args=defaults)


def open_logs(
    work_dir: Path, title: str | None, by_epoch: bool, log_level: int | str, processor: Any, visualizer: Any
) -> Logs:
    """Name the run after `title` and the current time, and create its log folder and logging objects.

    All ranks use the same name; only rank 0 writes files.

    Args:
        work_dir: the folder in which the log folder is created.
        title: the name of the experiment without the time; None for only the time.
        by_epoch: whether training is epoch-based.
        log_level, processor, visualizer: the Runner's arguments.
    """
    is_main = is_main_process()
    stamps = [time.strftime("%Y%m%d_%H%M%S")]
    if is_main:
        stamps = [_create_folder(work_dir, stamps[0])]
    broadcast_object_list(stamps)
    (stamp,) = stamps
    experiment, log_dir = f"{title}_{stamp}" if title else stamp, work_dir / stamp
    log_file = log_dir / f"{stamp}.log" if is_main else None
    hub = MessageHub(experiment)
    if processor is None or isinstance(processor, Mapping):
        defaults = {"type": "LogProcessor", "by_epoch": by_epoch}
        processor = LOG_PROCESSORS.build(processor or {}, default_args=defaults)
    without_tensorboard = visualizer is None and not is_installed("tensorboard")
    if visualizer is None:
        visualizer = {"vis_backends": default_backends()}
    if not is_main and not isinstance(visualizer, Mapping):
        visualizer = {}  # a visualizer object would write files on every rank
    if isinstance(visualizer, Mapping):
        overrides = {} if is_main else {"vis_backends": None}
        visualizer = build_visualizer({**visualizer, **overrides}, experiment, log_dir)
    elif not hasattr(visualizer, "add_config"):
        raise ConfigError(f"must be a Visualizer or a dict, not {visualizer!r}", "visualizer")
    logger = build_logger(experiment, log_file, log_level, get_rank())
    if without_tensorboard:
        logger.info(
            "TensorBoard is not installed. To log to TensorBoard, run: pip install 'slipstream[tensorboard]'"
        )
    return Logs(stamp, experiment, log_dir, logger, hub, Meter(hub), processor, visualizer)


def log_start(logger: MMLogger, seed: int, work_dir: str) -> None:
    """Log a run's environment, seed and folder."""
    logger.info("Environment: " + ", ".join(f"{k} {v}" for k, v in collect_env().items()))
    logger.info(f"Seed: {seed}; work_dir: {work_dir}")


def _repeatable(cfg: Config, seed: int) -> Config:
    """Return a configuration that repeats a run: a copy with the run's seed, and without `resume=True`."""
    saved = cfg.copy()
    saved["randomness"] = {**(saved.get("randomness") or {}), "seed": seed}
    if saved.get("resume") is True:
        saved["resume"] = False
    return saved


def show_config(cfg: Config, seed: int, visualizer: Visualizer, logger: MMLogger) -> None:
    """On rank 0, pass a non-empty configuration to the visualizer."""
    if not is_main_process() or not len(cfg):
        return
    try:
        visualizer.add_config(_repeatable(cfg, seed))
    except ConfigError as error:  # the configuration may contain objects
        logger.debug(f"The visualizer cannot show the configuration: {error}")


def write_config(cfg: Config, seed: int, work_dir: str, timestamp: str, logger: MMLogger) -> None:
    """On rank 0, write a non-empty configuration to the work_dir."""
    if is_main_process() and len(cfg):
        path = Path(work_dir, f"{Path(cfg.filename).stem if cfg.filename else timestamp}.py")
        try:
            write_text(path, config_text(_repeatable(cfg, seed), "py"))
        except OSError as error:
            logger.warning(f"{path} cannot be written ({error}); checkpoints also contain the configuration")
