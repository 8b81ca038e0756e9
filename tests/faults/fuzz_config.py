"""Build and run Runners from mutated configurations, and report every unacceptable error.

An error is acceptable if it is a SlipstreamError that names a key, or an error that depends on the data.

Run `python tests/faults/fuzz_config.py --count 100000` with src/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.mutations import Mutation, every_replacement, mutated, paths, summary
from slipstream.errors import SlipstreamError
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner
from tiny_runs import Accuracy, Net

SECONDS = 60
"""Time limit for one input, in seconds."""


class Blocks(BaseModel):
    """A model with repeated blocks and a data preprocessor."""

    def __init__(self, width=4, data_preprocessor=None, init_cfg=None):
        super().__init__(data_preprocessor, init_cfg)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)) for _ in range(3)
        )
        self.last = nn.Linear(4, 3)

    def forward(self, inputs, targets, mode):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        scores = self.last(inputs)
        loss = {"loss": nn.functional.cross_entropy(scores, targets)}
        return loss if mode == "loss" else (scores, targets)


ABOUT_DATA = (
    "is out of bounds|stack expects each tensor to be equal size|is out of range|index out of bounds"
    r"|expected input.* to have \d+ channels|Kernel size can't be greater than actual input size"
)
"""Errors that torch raises for the contents of batches. They depend on the data and not on a single key."""


class EndOfRunError(Exception):
    """Raised by `Stop` to end a run."""


class Stop(Hook):
    """A hook that ends the run at the second epoch or the fourth iteration."""

    priority = "LOWEST"

    def before_train_epoch(self, runner):
        if runner.epoch:
            raise EndOfRunError

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter >= 3:
            raise EndOfRunError


class Overtime(BaseException):
    """An input took longer than `SECONDS`."""


def loader(batch_size: int, **options: Any) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    return dict(batch_size=batch_size, dataset=data, **options)


def by_epoch() -> dict[str, Any]:
    """Return a valid configuration with most of MMEngine's keys."""
    sampler = dict(type="DefaultSampler", shuffle=True)
    return dict(
        model=dict(type=Net),
        work_dir="fuzzed",
        train_dataloader=loader(8, sampler=sampler, collate_fn=dict(type="default_collate"), num_workers=0,
                                drop_last=True, pin_memory=False),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_begin=1, val_interval=1, dynamic_intervals=[[1, 1]]),
        optim_wrapper=dict(
            type="OptimWrapper",
            optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True),
            paramwise_cfg=dict(bias_lr_mult=2.0, norm_decay_mult=0.0, bypass_duplicate=False,
                               custom_keys=dict(last=dict(lr_mult=0.1, decay_mult=0.5))),
            clip_grad=dict(max_norm=35, norm_type=2),
            accumulative_counts=1,
        ),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, begin=0, end=2, by_epoch=False),
            dict(type="CosineAnnealingLR", T_max=2, eta_min=1e-5, begin=0, end=2, by_epoch=True),
            dict(type="MultiStepLR", milestones=[1, 2], gamma=0.1),
            dict(type="ConstantMomentum", factor=0.5, end=1),
        ],
        auto_scale_lr=dict(enable=True, base_batch_size=16),
        val_dataloader=loader(8, sampler=dict(type="DefaultSampler", shuffle=False), persistent_workers=False),
        val_cfg=dict(fp16=False),
        val_evaluator=[dict(type=Accuracy, prefix="a", collect_device="cpu")],
        default_hooks=dict(
            timer=dict(type="IterTimerHook"),
            logger=dict(type="LoggerHook", interval=1, ignore_last=False, log_metric_by_epoch=True),
            checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=1, save_best="a/acc", rule="greater"),
            sampler_seed=dict(type="DistSamplerSeedHook"),
        ),
        custom_hooks=[
            dict(type="EMAHook", momentum=0.01, begin_iter=1, interval=1, update_buffers=True, priority="NORMAL"),
            dict(type="EarlyStoppingHook", monitor="a/acc", patience=3, min_delta=0.0, rule="greater"),
            dict(type="LossSpikeHook", window=9, threshold=9.0, min_history=2, patience=1),
            dict(type="PreciseBNHook", num_samples=8, interval=1),
        ],
        randomness=dict(seed=3, deterministic=False, diff_rank_seed=False),
        env_cfg=dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
                     dist_cfg=dict(backend="gloo")),
        log_processor=dict(window_size=10, by_epoch=True, num_digits=4,
                           custom_cfg=[dict(data_src="loss", method_name="mean", window_size=2)]),
        log_level="ERROR",
        visualizer=dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")]),
        launcher="none",
        default_scope="mmengine",
        resume=False,
        load_from=None,
        experiment_name="fuzz",
    )  # fmt: skip


def by_iter() -> dict[str, Any]:
    """Return a valid configuration that trains by iterations and sets most speed options."""
    return dict(
        model=dict(type=Blocks, width=4, init_cfg=dict(type="Kaiming", layer="Linear", mode="fan_in", bias=0)),
        work_dir="fuzzed",
        data_preprocessor=dict(type="BaseDataPreprocessor", non_blocking=True),
        train_dataloader=loader(4, sampler=dict(type="InfiniteSampler", shuffle=True), num_batch_per_epoch=3),
        train_cfg=dict(type="IterBasedTrainLoop", max_iters=3, val_interval=2),
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            dtype="bfloat16",
            loss_scale=dict(init_scale=512.0, growth_interval=10),
            optimizer=dict(type="AdamW", lr=1e-3, betas=[0.9, 0.99], eps=1e-8, weight_decay=0.05, amsgrad=False),
            accumulative_counts=2,
            clip_grad=dict(type="value", clip_value=0.5),
        ),
        param_scheduler=[
            dict(type="PolyLR", power=0.9, eta_min=1e-6, begin=1, end=3, by_epoch=False),
            dict(type="StepLR", step_size=2, gamma=0.5, by_epoch=False),
            dict(type="ExponentialLR", gamma=0.9, convert_to_iter_based=True),
            dict(type="CosineRestartLR", periods=[2, 2], restart_weights=[1, 0.5], by_epoch=False),
            dict(type="CosineAnnealingWarmRestarts", T_0=2, T_mult=1, by_epoch=False),
        ],
        val_dataloader=loader(4),
        val_cfg=dict(type="ValLoop"),
        val_evaluator=dict(type="Evaluator", metrics=[dict(type=Accuracy)]),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=2, by_epoch=False, save_last=True, save_begin=1,
                            filename_tmpl="at_{}.pth", out_dir="out"),
            timer=None,
        ),
        custom_hooks=[
            dict(type="GcHook", interval=2, warmup=1),
            dict(type="AverageBestHook", metric="acc", count=2, filename="mean.pth"),
            dict(type="EmptyCacheHook", after_epoch=True),
            dict(type="SyncBuffersHook", priority=40),
        ],
        speed=dict(
            gradient_centralization=dict(),
            adaptive_clip=dict(),
            layer_decay=dict(),
            sam=dict(rho=0.05),
            ema=dict(decay=0.9, type="exp", beta=5.0, interval=1, begin_iter=1),
            nan_guard=dict(action="skip", max_skipped=5),
            prefetch=2,
            channels_last=True,
            fused=False,
            auto=False,
        ),
        compile=False,
        sync_bn="torch",
        model_wrapper_cfg=dict(type="MMDistributedDataParallel", broadcast_buffers=False),
        find_unused_parameters=False,
        activation_checkpointing=None,
        training_params=dict(sync_bn=True, torch_compile=False, torch_compile_options=dict(mode="default")),
        randomness=dict(seed=0),
        env_cfg=dict(resource_limit=1024),
        log_processor=dict(by_epoch=False, mean_pattern=".*loss.*", log_with_hierarchy=True),
        log_level="ERROR",
        visualizer=dict(vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]),
    )  # fmt: skip


BASES: tuple[Callable[[], dict[str, Any]], ...] = (by_epoch, by_iter)


@dataclass
class Finding:
    """An input that raised an unacceptable error, exceeded the time limit, or raised no error (`accepted`)."""

    kind: str
    mutations: list[Mutation]
    base: str
    message: str = ""
    where: str = ""

    @property
    def signature(self) -> str:
        """The kind and place of the finding. Findings with the same signature most likely have the same cause."""
        return f"{self.kind}: {self.where}"


def tried(cfg: dict[str, Any], mutations: list[Mutation], base: str) -> Finding | None:
    """Build a Runner and train for a few steps. Return a finding, or None if the error is acceptable."""
    try:
        run(cfg)
    except SlipstreamError as error:
        named = names_a_key(str(error), cfg, mutations)
        return None if named else Finding("no key", mutations, base, _text(error), _origin(error))
    except Overtime as error:
        return Finding("hangs", mutations, base, "", _origin(error))
    except BaseException as error:
        if re.search(ABOUT_DATA, str(error)):
            return None
        return Finding("foreign", mutations, base, _text(error), _origin(error))
    return Finding("accepted", mutations, base)


def run(cfg: dict[str, Any], seconds: int = SECONDS) -> None:
    """Build a Runner in a temporary folder, and train for a few steps."""
    before = Path.cwd()
    folder = tempfile.mkdtemp(prefix="fuzz")
    method = torch.multiprocessing.get_start_method(allow_none=True)
    os.chdir(folder)
    signal.signal(signal.SIGALRM, _overtime)
    signal.alarm(seconds)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            runner = Runner.from_cfg(cfg)
            runner.register_hook(Stop())
            with contextlib.suppress(EndOfRunError):
                runner.train()
    finally:
        signal.alarm(0)
        os.chdir(before)
        shutil.rmtree(folder)
        torch.use_deterministic_algorithms(False)
        torch.multiprocessing.set_start_method(method, force=True)
        for name in [name for name in logging.Logger.manager.loggerDict if name.startswith("slipstream")]:
            logging.getLogger(name).handlers.clear()


def _overtime(*_: object) -> None:
    raise Overtime


def names_a_key(message: str, cfg: dict[str, Any], mutations: list[Mutation]) -> bool:
    """Return whether `message` contains a key of the configuration, or one that was removed or misspelled."""
    keys = {str(key) for path in paths(cfg) for key in path if isinstance(key, str)}
    keys |= {name for mutation in mutations for name in mutation.names()} | set(RUNNER_KEYS)
    return any(key and re.search(rf"(?<!\w){re.escape(key)}(?!\w)", message) for key in keys)


RUNNER_KEYS = tuple(Runner.__init__.__annotations__)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _origin(error: BaseException) -> str:
    """Return the exception type, and the last line of Slipstream's code in the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/slipstream/" in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} at {last.filename.rpartition('/slipstream/')[2]}:{last.lineno} {last.name}"
    )


def inputs(seed: int, count: int) -> Iterator[tuple[dict[str, Any], list[Mutation], str]]:
    """Yield `count` mutated configurations, which depend only on the seed."""
    for index in range(seed, seed + count):
        rng = random.Random(index)
        base = rng.choice(BASES)
        cfg, mutations = mutated(base(), rng, rng.choice([1, 1, 1, 2, 3]))
        yield cfg, mutations, base.__name__


def prepare() -> None:
    """Run the valid configurations once, because the time limit must not interrupt the imports of the first run."""
    torch.set_num_threads(1)
    for base in BASES:
        run(base(), seconds=0)


def _single(job: tuple[int, int]) -> list[Finding]:
    seed, count = job
    found = (tried(*item) for item in inputs(seed, count))
    return [finding for finding in found if finding is not None]


def _every(job: tuple[int, int]) -> list[Finding]:
    which, part = job
    base = BASES[which]
    found = []
    for index, (cfg, mutation) in enumerate(every_replacement(base())):
        if index % 16 == part:
            found.append(tried(cfg, [mutation], base.__name__))
    return [finding for finding in found if finding is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of random inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", action="store_true", help="replace each entry with each value instead")
    parser.add_argument("--accepted", action="store_true", help="also list the inputs that were accepted")
    args = parser.parse_args()
    chunk = 50
    jobs = [(args.seed + start, min(chunk, args.count - start)) for start in range(0, args.count, chunk)]
    if args.every:
        jobs = [(which, part) for which in range(len(BASES)) for part in range(16)]
    found = []
    with multiprocessing.get_context("spawn").Pool(args.jobs, prepare) as pool:
        for part in pool.imap_unordered(_every if args.every else _single, jobs):
            found += part
            for finding in part:
                if args.accepted or finding.kind != "accepted":
                    print(
                        finding.kind,
                        finding.base,
                        "; ".join(map(str, finding.mutations)),
                        finding.message,
                        flush=True,
                    )
    status = report(found)
    bad = sum(finding.kind != "accepted" for finding in found)
    if not args.every:
        print(summary("fuzz_config", args.count, bad))
    return status


def report(found: list[Finding]) -> int:
    """Print the findings by signature. Return 1 if any finding is not `accepted`."""
    print(dict(Counter(finding.kind for finding in found)))
    bad = [finding for finding in found if finding.kind != "accepted"]
    for signature, count in Counter(finding.signature for finding in bad).most_common():
        same = [finding for finding in bad if finding.signature == signature]
        print(f"\n{count} x {signature}")
        for finding in same[:3]:
            print(f"    {finding.base}: {'; '.join(map(str, finding.mutations))}\n        {finding.message}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
