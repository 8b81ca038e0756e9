"""Format the message hub's values as log lines and as scalars for the visualizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch

from slipstream.dataset.loading.loader import length
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.logging import HistoryBuffer
from slipstream.registry import LOG_PROCESSORS
from slipstream.typecheck import PositiveInt, Rule, check

Tag = dict[str, Any]


@LOG_PROCESSORS.register_module()
class LogProcessor:
    """Format the scalars and the runtime values in `runner.message_hub`.

    Scalars whose names match `mean_pattern` are averaged over `window_size` values. For other scalars, the latest value
    is shown.

    Args:
        window_size: number of recent values to average.
        by_epoch: count iterations within epochs (`Epoch(train) [1][100/500]`) rather than over the run
            (`Iter(train) [100/80000]`).
        custom_cfg: additional statistics, each configured by a dict. `data_src` is the scalar's name without its mode,
            such as `loss`. `method_name` is a method of `HistoryBuffer`: `mean`, `min`, `max`, `current`, or a
            registered statistic. `window_size` is a number, `"epoch"` or `"global"`; the default is the whole history.
            `log_name` is the name to log; the default is `data_src`, in which case the statistic replaces the scalar.
            Other keys are arguments of the method.
        num_digits: number of digits after the decimal point.
        log_with_hierarchy: keep the mode in the names passed to the visualizer (`train/loss`).
        mean_pattern: regular expression that matches the names of the scalars to average.

    Raises:
        ConfigError: an entry of `custom_cfg` is invalid.

    Example:
        >>> LogProcessor(custom_cfg=[dict(data_src="loss", method_name="mean", window_size="epoch")])
    """

    def __init__(
        self,
        window_size: PositiveInt = 10,
        by_epoch: bool = True,
        custom_cfg: list[dict[str, Any]] | None = None,
        num_digits: Annotated[int, Rule(lambda digits: 0 <= digits <= 20, "between 0 and 20")] = 4,
        log_with_hierarchy: bool = False,
        mean_pattern: str = r".*(loss|time|data_time|grad_norm).*",
    ) -> None:
        check(window_size, PositiveInt, "window_size")
        self.mean_pattern = re.compile(mean_pattern)
        self.window_size = window_size
        self.by_epoch = by_epoch
        self.custom_cfg = list(custom_cfg or ())
        self.num_digits = num_digits
        self.log_with_hierarchy = log_with_hierarchy
        _check_custom_cfg(self.custom_cfg, by_epoch)

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: str) -> tuple[Tag, str]:
        """Return the scalars to record and the line to log after a batch.

        Args:
            runner: the Runner.
            batch_idx: index of the batch in its epoch, from 0.
            mode: `"train"`, `"val"` or `"test"`.
        """
        scalars = self._scalars(runner, mode, batch_idx + 1)
        tag = self._with_hierarchy(scalars, mode)
        rates = {name: scalars.pop(name) for name in list(scalars) if name.partition("/")[0].endswith("lr")}
        for group in list(rates):
            if "/" in group:  # the entry without a group repeats the rate of the first group
                rates.pop(group.partition("/")[0], None)
        parts = [self._header(runner, batch_idx, mode)]
        parts.append(" ".join(f"{name}: {rate:.{self.num_digits}e}" for name, rate in rates.items()))
        eta = runner.message_hub.get_info("eta")
        if eta is not None and "time" in scalars and "data_time" in scalars:
            parts.append(f"eta: {timedelta(seconds=int(eta))}")
            parts += [f"{name}: {self._format(scalars.pop(name))}" for name in ("time", "data_time")]
        if self.by_epoch and mode != "test":
            tag["epoch"] = _epoch(runner, mode)
        tag["iter"] = _iterations(runner, mode)
        if (memory := _peak_memory()) is not None:
            tag["memory"] = memory
            parts.append(f"memory: {memory}")
        if mode == "val":
            histories = dict(_select_mode(runner.message_hub.log_scalars.items(), mode))
            # Metric values, and values restored from a checkpoint, belong to an earlier validation.
            outdated = [
                name for name, history in histories.items() if not (history.averaged and history.total)
            ]
            scalars = {k: v for k, v in scalars.items() if k.startswith("loss") and k not in outdated}
        if mode != "test":
            parts += [f"{name}: {self._format(value)}" for name, value in scalars.items()]
        return tag, "  ".join(part for part in parts if part)

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: str, with_non_scalar: bool = False
    ) -> tuple[Tag, str]:
        """Return the scalars to record and the line to log after validation or testing.

        Args:
            runner: the Runner.
            batch_idx: number of batches in the epoch.
            mode: `"val"` or `"test"`.
            with_non_scalar: include the mode's other values (for example, a confusion matrix) in the returned scalars.
                The log line always includes them.
        """
        scalars = self._scalars(runner, mode, batch_idx)
        for name in ("time", "data_time"):
            history = runner.message_hub.log_scalars.get(f"{mode}/{name}")
            if history is not None and all(_log_name(entry) != name for entry in self.custom_cfg):
                scalars[name] = history.mean(max(batch_idx, 1))
        infos: Tag = dict(_select_mode(runner.message_hub.runtime_info.items(), mode))
        tag = self._with_hierarchy((infos | scalars) if with_non_scalar else scalars, mode)
        tag = {_unique_name(runner.message_hub.log_scalars, mode, name): value for name, value in tag.items()}
        times: Tag = {name: scalars.pop(name) for name in ("data_time", "time") if name in scalars}
        shown = {**scalars, **infos, **times}
        items = [f"{name}: {self._format(value)}" for name, value in shown.items()]
        return tag, "  ".join([self._header(runner, None, mode, batch_idx), *items])

    def _scalars(self, runner: Any, mode: str, num_batches: int) -> Tag:
        histories = dict(_select_mode(runner.message_hub.log_scalars.items(), mode))
        tag: Tag = {
            name: history.mean(self.window_size)
            if history.averaged and self.mean_pattern.search(name)
            else history.current()
            for name, history in histories.items()
        }
        window_sizes = {"epoch": max(num_batches, 1), "global": max(_iterations(runner, mode), 1)}
        for entry in self.custom_cfg:
            arguments = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
            if "window_size" in arguments:
                size = arguments["window_size"]
                arguments["window_size"] = window_sizes.get(size, size)
            if (history := histories.get(entry["data_src"])) is not None:
                tag[_log_name(entry)] = history.statistics(entry["method_name"], **arguments)
        return tag

    def _with_hierarchy(self, tag: Tag, mode: str) -> Tag:
        prefix = f"{mode}/" if self.log_with_hierarchy else ""
        return {f"{prefix}{name}": value for name, value in tag.items()}

    def _header(self, runner: Any, batch_idx: int | None, mode: str, done: Any = None) -> str:
        """Return a header such as `Epoch(train) [1][ 10/500]`. If `batch_idx` is None, the epoch is complete.

        `done` is the number of batches in a complete epoch, over all loaders.
        """
        if mode == "train" and not self.by_epoch:
            return f"Iter(train) [{_align_right(runner.iter + 1, runner.max_iters)}/{runner.max_iters}]"
        batches = done or length(getattr(runner, f"{mode}_dataloader")) or "?"
        done = batches if batch_idx is None else _align_right(batch_idx + 1, batches)
        progress = f"[{done}/{batches}]"
        if self.by_epoch and mode != "test":
            epoch = f"[{_epoch(runner, mode)}]"
            progress = epoch.rjust(len(str(runner.max_epochs)) + len("[]")) + progress
        return f"{'Epoch' if self.by_epoch else 'Iter'}({mode}) {progress}"

    def _format(self, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.{self.num_digits}f}"
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
            return f"\n{value}\n"  # on separate lines, so that the rows are aligned
        return str(value)


def _unique_name(histories: Mapping[str, HistoryBuffer], mode: str, name: str) -> str:
    """Return the name of a metric, prefixed with its mode if training records a scalar of the same name (`loss`).

    Without the prefix, a tracker would show both in one curve, although the metric is logged once per validation run
    and the scalar at log intervals.
    """
    metric = histories.get(f"{mode}/{name}")
    collides = metric is not None and not metric.averaged and f"train/{name}" in histories
    return f"{mode}/{name}" if collides else name


_OWN_KEYS = ("data_src", "method_name", "log_name")


def _log_name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("log_name", entry["data_src"]))


def _select_mode(items: Iterable[tuple[str, Any]], mode: str) -> Iterator[tuple[str, Any]]:
    prefix = f"{mode}/"
    return ((key.removeprefix(prefix), value) for key, value in items if key.startswith(prefix))


def _epoch(runner: Any, mode: str) -> int:
    # During an epoch, `runner.epoch` counts the finished epochs. Validation runs after the increment.
    return int(runner.epoch) + (mode == "train")


def _iterations(runner: Any, mode: str) -> int:
    # `after_train_iter` hooks run before `runner.iter` is incremented.
    return int(runner.iter) + (mode == "train")


def _align_right(number: int, maximum: object) -> str:
    return str(number).rjust(len(str(maximum)))


def _peak_memory() -> int | None:
    """Return the peak device memory allocated by this process, in MiB; None without an accelerator."""
    if not torch.accelerator.is_available():
        return None
    return int(torch.accelerator.max_memory_allocated() / 2**20)


def _check_custom_cfg(custom_cfg: list[dict[str, Any]], by_epoch: bool) -> None:
    names: set[str] = set()
    for index, entry in enumerate(custom_cfg):
        path = f"custom_cfg[{index}]"
        for key in ("data_src", "method_name"):
            if not isinstance(entry, Mapping) or not isinstance(entry.get(key), str):
                raise ConfigError(f"must be a dict with a string '{key}', not {entry!r}", path)
        try:
            method = HistoryBuffer.find_statistics(entry["method_name"])
            arguments = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
            inspect.signature(method).bind(None, **arguments)
        except (UnknownNameError, TypeError) as error:
            raise ConfigError(str(error), path) from None
        window = entry.get("window_size")
        if window == "epoch" and not by_epoch:
            raise ConfigError(
                "'epoch' requires by_epoch=True; use a number or 'global'", f"{path}.window_size"
            )
        if window not in (None, "epoch", "global"):
            check(window, PositiveInt, f"{path}.window_size")
        if (name := _log_name(entry)) in names:
            message = f"another entry also logs '{name}'; set a different log_name for each entry"
            raise ConfigError(message, f"{path}.log_name")
        names.add(name)
