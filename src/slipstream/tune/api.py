"""The functions `tune`, `find_batch_size` and `find_lr`, and their counterparts for a Runner's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slipstream.checkpoint import get_random_state
from slipstream.config.duration import read_duration
from slipstream.dist import get_world_size
from slipstream.errors import ConfigError
from slipstream.runner import Runner
from slipstream.tune.batch_size import BatchSizeRow, BatchSizes, search_batch_sizes
from slipstream.tune.jobs import ObjectsJob, RunnerJob, Setting
from slipstream.tune.lr_range import LrRange, sweep_lr
from slipstream.tune.options import OPTIONS, check_names
from slipstream.tune.result import TuneResult
from slipstream.tune.search import Row, Search

# A custom loop uses `feed` for prefetching.
_LOOP_OPTIONS = tuple(name for name in OPTIONS if name != "prefetch")
LossFn = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]


def tune(
    model: nn.Module | Runner,
    loader: Any = None,
    optimizer: Optimizer | None = None,
    loss_fn: LossFn | None = None,
    budget: float | str = "5m",
    options: Iterable[str] | None = None,
    speed: Any = None,
    report: Callable[[Row], None] = lambda row: None,
) -> TuneResult:
    """Measure the speed options for a custom training loop or a Runner, and return the fastest combination.

    Each trial trains in its own process, so the model, the optimizer, the loader and all random states are unchanged.
    Pass `result.speed` to `accelerate` or to a new Runner.

    Args:
        model, optimizer, loss_fn: as for `accelerate`; or a Runner as the only positional argument.
        loader: an iterable over `(inputs, targets)` batches, which is restarted when it is exhausted.
        budget: time limit in seconds, or a string such as `5m` or `1h30m`.
        options: the names in `OPTIONS` to measure; None means all.
        speed: the options of the baseline: `'auto'`, a dict of the fields of `SpeedPlan`, or None for no options.
        report: called with each row as soon as it is measured.

    Raises:
        ConfigError: the budget is too short for one trial, or an argument is invalid.
        SlipstreamError: training with the baseline's options failed.
    """
    if isinstance(model, Runner):
        return tune_config(model._user_cfg, budget, options, model.model_name, report)
    names = check_names(_LOOP_OPTIONS if options is None else options)
    if "prefetch" in names:
        raise ConfigError(
            "'prefetch' requires a Runner; in your own loop, use feed(loader, prefetch=2)", "options"
        )
    make_job, seconds = _objects_job(model, loader, optimizer, loss_fn, speed), parse_budget(budget)
    _check_one_process()
    outcome = Search(make_job, speed, names, seconds, report).run()
    return TuneResult(outcome, speed, type(model).__name__)


def tune_config(
    cfg: Mapping[str, Any],
    budget: float | str = "5m",
    options: Iterable[str] | None = None,
    name: str = "the model",
    report: Callable[[Row], None] = lambda row: None,
    start: float | None = None,
) -> TuneResult:
    """Measure the speed options for a Runner's configuration; see `tune`.

    Args:
        cfg: the configuration, whose keys are the arguments of a Runner.
        budget, options, report: as for `tune`.
        name: name of the configuration in the summary.
        start: the time at which the budget starts, as returned by `time.monotonic()`; None means now.

    Raises:
        ConfigError, SlipstreamError: as for `tune`.
    """
    names = check_names(OPTIONS if options is None else options)
    _check_one_process()
    search = Search(config_job(cfg), cfg.get("speed"), names, parse_budget(budget), report, start)
    return TuneResult(search.run(), cfg.get("speed"), name)


def find_batch_size(
    model: nn.Module,
    loader: Any,
    optimizer: Optimizer,
    loss_fn: LossFn,
    max_batch_size: int = 1024,
    speed: Any = None,
    budget: float | str = "5m",
    report: Callable[[BatchSizeRow], None] = lambda row: None,
) -> BatchSizes:
    """Find the largest batch size that fits in memory, and the fastest batch size.

    Each size is measured in its own process, which frees its memory on exit. The model, the optimizer and all random
    states of the calling process are unchanged.

    If a process group exists, all of its ranks must call this function with the same arguments. They try the same sizes
    together, with data-parallel training, and return the same result. Batch sizes are per process. A size that fails
    on any rank is considered not to fit.

    Args:
        model, optimizer, loss_fn: as for `accelerate`; with several processes, they must be picklable.
        loader: a `DataLoader` with a map-style dataset; its batch size is ignored.
        max_batch_size: largest batch size to try.
        speed: the speed options, as for `accelerate`; None for no options.
        budget: time limit in seconds, or a string such as `5m`.
        report: called on every rank with each row as soon as it is measured.

    Raises:
        ConfigError: an argument is invalid, or the budget is too short for the first batch size.
        SlipstreamError: no batch size fits.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("must not be wrapped in DistributedDataParallel; pass model.module", "model")
    make_job = _objects_job(model, loader, optimizer, loss_fn, speed)
    return search_batch_sizes(make_job, max_batch_size, parse_budget(budget), report)


def find_lr(
    model: nn.Module,
    loader: Any,
    optimizer: Optimizer,
    loss_fn: LossFn,
    start: float = 1e-7,
    end: float = 1.0,
    steps: int = 100,
    speed: Any = None,
    budget: float | str = "5m",
) -> LrRange:
    """Run a learning rate range test, and return the losses and a suggested learning rate.

    The test runs in its own process, so the model, the optimizer and all random states are unchanged.

    Args:
        model, optimizer, loss_fn: as for `accelerate`.
        loader: an iterable of batches.
        start, end: the first and last learning rates of the parameter group with the largest learning rate.
        steps: number of steps. The test ends earlier if a loss is not finite, or the smoothed loss exceeds four times
            its smallest value.
        speed: the speed options, as for `accelerate`; None for no options.
        budget: time limit in seconds, or a string such as `5m`.

    Raises:
        ConfigError: an argument is invalid, or the test does not finish within the budget.
        SlipstreamError: the run fails.
    """
    _check_one_process()
    make_job = _objects_job(model, loader, optimizer, loss_fn, speed)
    return sweep_lr(make_job, start, end, steps, parse_budget(budget))


def config_job(cfg: Mapping[str, Any]) -> Callable[[Setting], RunnerJob]:
    """Return a function that creates a training run with a Runner's configuration for a given `Setting`.

    Raises:
        ConfigError: the configuration does not include training.
    """
    for key in ("train_dataloader", "train_cfg", "optim_wrapper"):
        if cfg.get(key) is None:
            raise ConfigError("is required, because training steps are measured", key)
    return lambda setting: RunnerJob(cfg, setting)


def parse_budget(budget: float | str) -> float:
    """Convert a budget to seconds. It can be a number, or a string such as `300`, `90s`, `5m` or `1h30m`.

    Raises:
        ConfigError: the budget is not a positive duration.
    """
    return read_duration(budget, "budget")


def _objects_job(
    model: Any, loader: Any, optimizer: Any, loss_fn: Any, speed: Any
) -> Callable[[Setting], ObjectsJob]:
    if any(value.is_cpu and value.is_shared() for value in model.state_dict().values()):
        raise ConfigError("must not be in shared memory, because the trials would train it", "model")
    state = get_random_state()
    return lambda setting: ObjectsJob(model, loader, optimizer, loss_fn, speed, state, setting)


def _check_one_process() -> None:
    if (size := get_world_size()) > 1:
        raise ConfigError(f"must run in a single process, but the world size is {size}", "tune")
