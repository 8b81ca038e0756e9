"""One run of `slipstream bench`: time the training steps of one recipe with one set of options.

`python -m slipstream.cli.bench_cell SPEC RESULT` reads a `Cell` from the JSON file SPEC and writes the measurement to
the JSON file RESULT. The exit status is 1 if the run fails or its options do not take effect.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config

__all__ = ["Cell", "main"]

_OVERRIDDEN_OPTIONS = ("precision", "compile", "parallel", "ema", "sync_bn")
"""The speed options that each run overrides."""


@dataclass(frozen=True)
class Cell:
    """One run, and one row of the result table: a recipe and the options used for the measurement."""

    recipe: str
    compiled: bool
    """Whether the whole step runs as one graph."""
    processes: int
    """Number of processes. Two or more processes train with DDP."""
    amp: bool
    """Whether the step runs in mixed precision (bfloat16)."""
    averaging: bool
    """Whether SyncBN and EMA are enabled."""
    synthetic: bool
    """Whether every step uses the same batch, in which case no data is loaded after the first batch."""
    warmup: int
    steps: int
    batch_size: int | None
    """Samples per process. If None, the recipe's batch size is used."""
    size: tuple[int, int] | None
    """Height and width of generated images in pixels. If None, the recipe's size is used."""
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    trust: bool = False

    @property
    def options(self) -> str:
        """A description of this run's options, without the recipe name."""
        parallel = "1 device" if self.processes == 1 else f"{self.processes} devices"
        parts = ["compiled" if self.compiled else "eager", parallel, "AMP" if self.amp else "float32"]
        return ", ".join([*parts, *(["SyncBN + EMA"] if self.averaging else [])])


def main(argv: list[str]) -> int:
    """Execute the run described in the file whose path is `argv[0]`, and return the exit status."""
    from slipstream.errors import SlipstreamError

    spec = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    size = spec["size"] and tuple(spec["size"])
    cell = Cell(**{**spec, "size": size, "overrides": tuple(spec["overrides"])})
    try:
        if cell.processes == 1:
            _measure(0, cell, argv[1], None)
        else:
            _spawn(cell, argv[1])
    except SlipstreamError as error:
        print(f"slipstream: error: {error}", file=sys.stderr)
        return 1
    return 0


def _spawn(cell: Cell, result: str) -> None:
    """Measure in multiple processes. Raise the error from the first process that fails."""
    import socket

    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    from slipstream.errors import SlipstreamError

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        spawn(_measure, (cell, result, port), nprocs=cell.processes)
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise SlipstreamError(str(error).strip().splitlines()[-1]) from error


def _measure(rank: int, cell: Cell, result: str, port: int | None) -> None:
    """Run the warm-up steps and the timed steps. Rank 0 writes the result."""
    if port is not None:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": cell.processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="127.0.0.1")
    import torch

    from slipstream.cli.profiling import Finished
    from slipstream.cli.step_times import StepTimer
    from slipstream.devices import default_device
    from slipstream.errors import ConfigError
    from slipstream.runner import Runner
    from slipstream.step import CompiledStep
    from slipstream.training.config_paths import at_user_paths

    device = default_device()
    if device.type != "cpu" and torch.accelerator.device_count() < cell.processes:
        raise ConfigError(
            f"the run requires {cell.processes} devices, but this machine has {torch.accelerator.device_count()}; use "
            "`--devices 1`"
        )
    cfg = _config(cell, str(Path(result).parent))
    timer = StepTimer(cell.warmup, cell.steps, device)
    with at_user_paths(cfg):
        runner = Runner.from_cfg(cfg)
        repeated_samples = None
        if cell.synthetic:
            loop = runner.train_loop
            loop.dataloader, repeated_samples = _repeat_first_batch(loop.dataloader)
        runner.register_hook(timer)
        try:
            runner.train()
        except Finished:
            pass
        else:
            raise ConfigError(
                f"training ended after {timer.done} of {cell.warmup + cell.steps} steps; reduce `--steps` or `--warmup`"
            )
    graph = isinstance(runner.step, CompiledStep) and timer.used_graph
    if cell.compiled and not graph:
        raise ConfigError(
            "the timed steps did not run as one graph; run `slipstream train` with compile=True, and check its log"
        )
    if not timer.finite:
        raise ConfigError(
            "the loss of a timed step is not finite; run `slipstream train` with the recipe, and check its log"
        )
    if rank == 0:
        measurement = {
            "seconds": timer.seconds,
            "samples_per_step": repeated_samples or timer.samples / cell.steps,
            "memory": timer.memory(),
        }
        Path(result).write_text(
            json.dumps({**measurement, "cell": asdict(cell), "threads": torch.get_num_threads()})
        )


def _config(cell: Cell, work_dir: str) -> Config:
    """Return the recipe's configuration with the run's options, and without validation, hooks or output files."""
    from slipstream.cli.configure import load_config
    from slipstream.errors import ConfigError
    from slipstream.tune.measured_config import keep_training_only

    cfg = load_config(cell.recipe, cell.overrides, cell.config_dir, cell.trust).cfg
    cfg.default_hooks, cfg.custom_hooks, cfg.load_from = {}, [], None
    keep_training_only(cfg, work_dir)
    cfg.launcher = "none" if cell.processes == 1 else "pytorch"
    cfg.log_level = "WARNING"
    params = dict(cfg.get("training_params") or {})
    for option in (
        "ema",
        "ema_params",
        "sync_bn",
        "mixed_precision",
        "torch_compile",
        "torch_compile_options",
    ):
        params.pop(option, None)
    if "speed" in params:
        params["speed"] = _other_options(params["speed"], cell)
    cfg.training_params = params or None
    cfg.speed = {**_other_options(cfg.get("speed"), cell), **_speed(cell)}
    for length in ("max_epochs", "max_iters"):
        if length in cfg.train_cfg:
            cfg.train_cfg[length] = max(cfg.train_cfg[length], cell.warmup + cell.steps)
    if cell.batch_size is not None:
        cfg.train_dataloader.batch_size = cell.batch_size
    if cell.size is not None:
        dataset = cfg.train_dataloader.dataset
        if not isinstance(dataset, Mapping) or dataset.get("type") != "StreetScenes":
            raise ConfigError(
                f"applies only to generated images, but {cell.recipe} reads its images from files; "
                "remove this option",
                "--size",
            )
        cfg.train_dataloader.dataset.size = list(cell.size)
    return cfg


def _other_options(speed: Any, cell: Cell) -> dict[str, Any]:
    """Return the recipe's speed options that the run does not override."""
    from slipstream.tune.jobs import merged_speed

    # An eager step cannot be captured as a CUDA graph.
    removed = _OVERRIDDEN_OPTIONS if cell.compiled else (*_OVERRIDDEN_OPTIONS, "cuda_graph")
    return {name: value for name, value in merged_speed(speed, {}).items() if name not in removed}


def _speed(cell: Cell) -> dict[str, Any]:
    speed: dict[str, Any] = {"precision": "bf16" if cell.amp else "fp32"}
    if cell.compiled:
        speed["compile"] = {"scope": "step"}
    if cell.processes > 1:
        speed["parallel"] = "ddp"
    if cell.averaging:
        speed.update(ema={"type": "constant", "decay": 0.99}, sync_bn=True)
    return speed


def _repeat_first_batch(loader: Any) -> tuple[Any, int]:
    """Return a loader that repeats the first batch of `loader`, and the number of samples in all processes' batches.

    The returned loader yields as many batches as `loader`.
    """
    from torch.utils.data import DataLoader

    from slipstream.compare.subject import Batches
    from slipstream.dataset.loading.loader import BatchSizes
    from slipstream.dist import get_world_size

    batch = next(iter(loader))
    samples = BatchSizes(loader).get(0, batch) * get_world_size()
    return DataLoader(Batches([batch], len(loader)), batch_size=None), samples


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
