"""The contenders for benchmarks/gpu.py. All train the same network in bf16 on batches already on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from networks import Case
from slipstream import accelerate

Batch = Sequence[Tensor]
Step = Callable[[Batch], Tensor]


class Clock:
    """Measures the time between two events on the device; on a CPU, measures the elapsed wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._start = self._now()

    def stop(self) -> None:
        self._stop = self._now()

    def seconds(self) -> float:
        """Wait for the device and return the time from `start` to `stop`."""
        if self.device.type == "cpu":
            return float(self._stop - self._start)
        torch.accelerator.synchronize(self.device)
        return float(self._start.elapsed_time(self._stop)) * 1e-3


@dataclass(frozen=True)
class Setting:
    """The settings shared by all contenders of a network."""

    case: Case
    device: torch.device
    batches: list[Batch]
    backend: str
    """`torch.compile` backend, also used by Slipstream."""

    def network(self, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = self.case.build().to(self.device)
        options: dict[str, Any] = {"fused": True} if fused else {}
        return net, torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=5e-4, **options)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)


Train = Callable[[int, Clock], Tensor]
"""A function that trains for a number of steps between `clock.start` and `clock.stop`, and returns the last loss."""


def repeat_step(setting: Setting, step: Step) -> Train:
    def train(steps: int, clock: Clock) -> Tensor:
        clock.start()
        for batch in islice(cycle(setting.batches), steps):
            loss = step(batch)
        clock.stop()
        return loss

    return train


def loop(setting: Setting, compiled: bool = False, fused: bool = False) -> Train:
    net, optimizer = setting.network(fused)
    run: Any = torch.compile(net, backend=setting.backend) if compiled else net

    def step(batch: Batch) -> Tensor:
        with setting.autocast():
            loss = setting.case.loss(run(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return repeat_step(setting, step)


def cuda_graph_loop(setting: Setting) -> Train:
    """Return a loop that replays its step as one CUDA graph, as described in PyTorch's notes on CUDA graphs."""
    net, optimizer = setting.network(fused=True)
    static = [tensor.clone() for tensor in setting.batches[0]]

    def run_step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = setting.case.loss(net(static[0]), static[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            optimizer.zero_grad()
            run_step()
    torch.cuda.current_stream().wait_stream(side_stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run_step()

    def step(batch: Batch) -> Tensor:
        for old, new in zip(static, batch, strict=True):
            old.copy_(new)
        graph.replay()
        return loss

    return repeat_step(setting, step)


def slipstream(setting: Setting, compiled: bool = True, **options: Any) -> Train:
    net, optimizer = setting.network(fused=False)
    compile_options = {"scope": "step", "cache": False, "backend": setting.backend}
    speed = {"precision": "bf16", "fused": True, "compile": compile_options if compiled else None, **options}
    step = accelerate(net, optimizer, setting.case.loss, speed=speed)
    return repeat_step(setting, lambda batch: step(batch)["loss"])


def with_accelerate(setting: Setting) -> Train:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=setting.device.type == "cpu")
    net, optimizer = accelerator.prepare(*setting.network(fused=True))

    def step(batch: Batch) -> Tensor:
        with accelerator.autocast():
            loss = setting.case.loss(net(batch[0]), batch[1])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return repeat_step(setting, step)


def with_lightning(setting: Setting) -> Train:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    network, optimizer = setting.network(fused=True)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.loss = setting.case.loss(self.net(batch[0]), batch[1])
            return self.loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Timer(pl.Callback):
        def __init__(self, steps: int, clock: Clock) -> None:
            self.steps, self.clock = steps, clock

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.clock.start()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == self.steps - 1:
                self.clock.stop()

    module = Module()
    folder = TemporaryDirectory()

    def train(steps: int, clock: Clock) -> Tensor:
        trainer = pl.Trainer(
            accelerator={"cuda": "gpu"}.get(setting.device.type, setting.device.type),
            devices=1,
            precision="bf16-mixed",
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder.name,
            callbacks=[Timer(steps, clock)],
        )
        trainer.fit(module, list(islice(cycle(setting.batches), steps)))
        return module.loss.detach()

    return train


EMA_AND_CHANNELS_LAST = {"ema": {"decay": 0.9999, "type": "threshold"}, "channels_last": True}
EAGER = "eager loop"
COMPILED = (
    "loop, torch.compile(model), fused SGD",
    "Slipstream, one graph",
    "Slipstream, one graph, EMA, channels_last",
)
"""Contenders to compile in advance. The contender with a CUDA graph uses the code of "Slipstream, one graph"."""


def contenders(device: torch.device) -> dict[str, Callable[[Setting], Train]]:
    """Return the contenders that this machine supports, in order of importance."""
    supports_graphs = device.type == "cuda"
    candidates: dict[str, Callable[[Setting], Train] | None] = {
        EAGER: loop,
        COMPILED[0]: partial(loop, compiled=True, fused=True),
        COMPILED[1]: slipstream,
        "Slipstream, one graph, CUDA graph": partial(slipstream, cuda_graph=True)
        if supports_graphs
        else None,
        "loop in a CUDA graph, fused SGD": cuda_graph_loop if supports_graphs else None,
        "Slipstream, eager": partial(slipstream, compiled=False),
        COMPILED[2]: partial(slipstream, **EMA_AND_CHANNELS_LAST),
        "Accelerate": with_accelerate if find_spec("accelerate") else None,
        "Lightning": with_lightning if find_spec("lightning") else None,
    }
    return {name: make for name, make in candidates.items() if make is not None}
