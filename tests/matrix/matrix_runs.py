"""Training runs of the matrix with a Runner, and detection of active options."""

import traceback
from itertools import pairwise
from statistics import median_low

import torch
from matrix_by_hand import STOP
from matrix_nets import BATCH, CALLS, EPOCH, OPTIMIZERS, STEPS, count_call, make, samples
from matrix_options import MAX_NORM, OPTIONS
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from slipstream.errors import SlipstreamError
from slipstream.hooks import EMAHook, Hook
from slipstream.model import (
    BaseModel,
    MMDistributedDataParallel,
    ScheduledEMA,
    StochasticWeightAverage,
    unwrap_model,
)
from slipstream.model.sync_batchnorm import SyncBatchNorm
from slipstream.runner import Runner
from slipstream.speed.adaptive_clip import ClipUnits
from slipstream.speed.gradient_centralization import CentralizeGradients
from slipstream.speed.layer_decay import DecayLayers
from slipstream.speed.sam import SharpnessAware
from slipstream.step.graph import GraphStep


class Task(BaseModel):
    """A network with its loss. It also logs the precision of the scores and whether the images are in channels_last."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images, classes, mode):
        if not torch.compiler.is_compiling():
            count_call(self)
        scores = self.net(images)
        channels_last = images.is_contiguous(memory_format=torch.channels_last)
        return {
            "loss": F.cross_entropy(scores, classes),
            "eps": torch.full((), torch.finfo(scores.dtype).eps),
            "channels_last": torch.full((), float(channels_last)),
        }


class Backend:
    """A `torch.compile` backend that counts graphs, recomputed blocks and calls to the loss, and does not compile.

    Graphs of `conv` that recompute a block run through AOTAutograd, as with Inductor, because the block's BatchNorm
    updates a counter in place.
    """

    def __init__(self, net):
        self.through_aot = net == "conv"
        self.graphs = self.recomputed = self.losses = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        recomputed = sum("checkpoint" in str(node.target) for node in graph.graph.nodes)
        self.recomputed += recomputed
        run = aot_eager(graph, inputs) if recomputed and self.through_aot else graph.forward
        losses = sum("cross_entropy" in str(node.target) for node in graph.graph.nodes)

        def counted(*args):
            self.losses += losses
            return run(*args)

        return counted if losses else run


class StoppedError(Exception):
    """Raised to end the first of two runs."""


class Record(Hook):
    """A hook that records step outputs, weight updates, schedules and forward passes. It can end the run."""

    priority = "LOWEST"

    def __init__(self, backend, stop=None):
        self.backend, self.stop, self.first = backend, stop, None
        self.logs, self.groups, self.moves = [], [], 0

    def before_train(self, runner):
        self.first, self.weights = runner.iter, _copies(runner.model)
        self.calls = [self._calls(runner)]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls.append(self._calls(runner))
        self.logs.append({name: value.to("cpu", copy=True) for name, value in outputs.items()})
        group = runner.optim_wrapper.param_groups[0]
        self.groups.append((group["lr"], group.get("momentum", group.get("betas"))))
        now = _copies(runner.model)
        self.moves += any(not torch.equal(a, b) for a, b in zip(now, self.weights, strict=True))
        self.weights = now
        if runner.iter + 1 == self.stop:
            raise StoppedError

    def seen(self, name):
        return {float(logs[name]) for logs in self.logs if name in logs}

    def _calls(self, runner):
        return CALLS.get(unwrap_model(runner.model), 0) + getattr(self.backend, "losses", 0)

    def passes(self):
        """Return the number of forward passes of a batch, or None if the backend does not count them.

        This is the median over the batches, because the verification of new graphs adds forward passes to a few.
        """
        if not hasattr(self.backend, "losses"):
            return None
        return median_low(after - before for before, after in pairwise(self.calls))


def _copies(model):
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def _config(net, options, folder, processes, backend):
    images = TensorDataset(*samples())
    config = dict(
        work_dir=str(folder),
        train_dataloader=dict(
            dataset=images,
            batch_size=BATCH // processes,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=STEPS // EPOCH),
        optim_wrapper=dict(optimizer=dict(OPTIMIZERS[net])),
        default_hooks=dict(checkpoint=None),
        launcher="pytorch" if processes > 1 else "none",
        randomness=dict(seed=0),
        log_level="ERROR",
        speed={},
        backend=backend,
    )
    for option in options:
        OPTIONS[option](config)
    config.pop("backend", None)
    return config


def _run(net, config, backend, stop=None):
    """Train to the end or until `stop`. Return the Runner, its record and its warnings."""
    record, warnings = Record(backend, stop), []
    runner = Runner(Task(make(net)), custom_hooks=[record], **config)
    runner.logger.warning = lambda line, *args: warnings.append(str(line))
    try:
        runner.train()
        assert stop is None
    except StoppedError:
        assert stop is not None
    return runner, record, warnings


def train(net, options, folder, processes=1, backend=None):
    """Return the results of a training run as a dict of plain values, or its error as a string."""
    torch._dynamo.reset()
    backend = backend or Backend(net)
    warnings, losses = [], []
    try:
        if "resume" in options:
            config = _config(net, options, folder, processes, backend)
            _, record, warnings = _run(net, config, backend, STOP)
            losses = [logs["loss"] for logs in record.logs]
        config = _config(net, options, folder, processes, backend)
        runner, record, more = _run(net, dict(config, resume=bool(losses)), backend)
    except SlipstreamError as error:
        return str(error)
    average = next((hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)), None)
    return {
        "losses": torch.stack([*losses, *(logs["loss"] for logs in record.logs)]),
        "weights": _state(unwrap_model(runner.model)),
        "averages": None if average is None else _state(average.module),
        "moves": record.moves,
        "graphs": getattr(backend, "graphs", None),
        "in force": _in_force(runner, record, backend),
        "warnings": [*warnings, *more],
    }


def train_all(runs, folder, processes=2):
    """Return {(net, options): result of `train`}. After a failure, store its traceback and stop."""
    found = {}
    for number, (net, options) in enumerate(runs):
        try:
            found[net, options] = train(net, options, folder / str(number), processes)
        except Exception:
            found[net, options] = traceback.format_exc()
            break  # another process may be waiting for this one
    return found


def _state(module):
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}
    return {name.removeprefix("net."): value.detach().to("cpu", copy=True) for name, value in whole.items()}


def _in_force(runner, record, backend):
    """Return the options that are active, regardless of whether they were requested."""
    core, optim, step = unwrap_model(runner.model), runner.optim_wrapper, runner.step
    parts = {type(part) for part in optim.parts}
    averages = [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
    one_graph = isinstance(step, GraphStep) and step.uses_graph and step._captured is not None
    if getattr(backend, "recomputed", None) is not None and backend.graphs:
        recomputed = backend.recomputed > 0
    else:
        recomputed = CALLS.get(core.net.block, 0) == 2 * CALLS.get(core, 0)
    found = {
        "bf16": record.seen("eps") == {torch.finfo(torch.bfloat16).eps},
        "fp16": record.seen("eps") == {torch.finfo(torch.float16).eps},
        "compile=step": one_graph and step._captured.verified == {optim.accumulative_counts == 1, True},
        "compile=model": not isinstance(step, GraphStep) and core._compiled_call_impl is not None,
        "EMA": any(isinstance(average, ScheduledEMA) for average in averages),
        "SyncBN": any(isinstance(module, SyncBatchNorm) for module in core.modules()),
        "DDP": isinstance(runner.model, MMDistributedDataParallel),
        "FSDP2": all(isinstance(param, DTensor) for param in core.parameters()),
        "accumulation": record.moves < len(record.logs) // 2,
        "clipping": bool(record.seen("grad_norm")) and max(record.seen("grad_norm")) > MAX_NORM,
        "channels_last": record.seen("channels_last") == {1.0},
        "checkpointing": recomputed,
        "fused": all(group.get("fused") is True for group in optim.param_groups),
        "param groups": len({group["lr"] for group in optim.param_groups}) > 1,
        "scheduler": len(set(record.groups)) > 1,
        "resume": record.first == STOP,
        "SAM": SharpnessAware in parts and record.passes() in (2, None),
        "adaptive clipping": ClipUnits in parts,
        "centralization": CentralizeGradients in parts,
        "layer decay": DecayLayers in parts,
        "SWA": any(isinstance(average, StochasticWeightAverage) for average in averages),
    }
    return {name for name, there in found.items() if there}
