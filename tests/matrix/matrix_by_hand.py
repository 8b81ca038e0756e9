"""Reference of the matrix: a plain PyTorch loop in one process, in eager mode, without Slipstream."""

import copy
import math
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from matrix_nets import OPTIMIZERS, STEPS, batches, make

WINDOW, STOP = 3, 10
MAX_NORM = 0.2
DECAY, BETA = 0.9, 15.0
SCALE = dict(init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=4)
"""Initial loss scale: only the first step overflows, regardless of rounding."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR_STEPS, MOMENTUM_STEPS = (0.1, 8), (0.5, 16)
"""Initial factor of the schedules, and the step at which it has increased to 1."""


@cache
def by_hand(net, options, shards):
    """Train with the `options` (a frozenset of names) that change the results.

    With two `shards`, each batch is split in two halves with separate BatchNorm, as in two processes without SyncBN.

    Returns:
        The losses of all steps, and the weights and EMA weights (or None) of each shard.
    """
    torch.manual_seed(0)
    replicas = _replicas(make(net), shards)
    params = list(replicas[0].parameters())
    optimizer = _optimizer(net, replicas[0], "param groups" in options)
    dtype = next((dtype for name, dtype in DTYPES.items() if name in options), None)
    scale = _Scale() if dtype is torch.float16 else None
    averages = [_Average(replica) for replica in replicas] if "EMA" in options else None
    window = WINDOW if "accumulation" in options else 1
    held, losses = [0.0] * len(params), []
    for number, (x, y) in enumerate(batches()):
        if "scheduler" in options:
            _schedule(optimizer, number)
        ends = (number + 1) % window == 0 or number + 1 == STEPS
        size = STEPS % window if window > 1 and number >= STEPS - STEPS % window else window
        parts = []
        for shard, replica in enumerate(replicas):
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
                loss = F.cross_entropy(replica(x[shard::shards]), y[shard::shards])
            grads = torch.autograd.grad(loss / size * (scale.value if scale else 1.0), params)
            held = [sum_ + grad / shards for sum_, grad in zip(held, grads, strict=True)]
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean())
        if ends:
            _update(optimizer, params, held, scale, "clipping" in options)
            held = [0.0] * len(params)
            for average, replica in zip(averages or [], replicas, strict=bool(averages)):
                average.take(replica, math.ceil(STEPS / window))
        if (number + 1) % STOP == 0 and "resume" in options:
            # A checkpoint stores the mean of the processes' BatchNorm statistics.
            _agree([dict(replica.named_buffers()) for replica in replicas])
            _agree([average.buffers() for average in averages or []])
    weights = [{name: t.detach() for name, t in r.state_dict().items()} for r in replicas]
    return torch.stack(losses), weights, averages and [average.values for average in averages]


def _replicas(module, count):
    """Return copies of a network with shared parameters and separate buffers."""
    replicas = [module, *(copy.deepcopy(module) for _ in range(count - 1))]
    for replica in replicas[1:]:
        for mine, first in zip(replica.modules(), module.modules(), strict=True):
            mine._parameters = first._parameters
    return replicas


def _optimizer(net, module, groups):
    options = dict(OPTIMIZERS[net])
    make_optimizer = getattr(torch.optim, options.pop("type"))
    if not groups:
        return make_optimizer(module.parameters(), **options)
    lr, decay = options["lr"], options["weight_decay"]

    def own(name):
        if name.startswith("head"):
            return dict(lr=lr * 0.5)
        if "norm" in name:
            return dict(weight_decay=0.0)
        return dict(lr=lr * 2.0) if name.endswith("bias") else dict(weight_decay=decay)

    return make_optimizer([{"params": [p], **own(name)} for name, p in module.named_parameters()], **options)


def _schedule(optimizer, number):
    def factor(start, steps):
        return start + (1 - start) * min(number / (steps - 1), 1.0)

    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("first_lr", group["lr"]) * factor(*LR_STEPS)
        momentum = 0.9 * factor(*MOMENTUM_STEPS)
        if "betas" in group:
            group["betas"] = (momentum, group["betas"][1])
        else:
            group["momentum"] = momentum


def _update(optimizer, params, grads, scale, clip):
    if scale is not None:
        grads = [grad / scale.value for grad in grads]
        if not scale.follow(all(bool(grad.isfinite().all()) for grad in grads)):
            return
    if clip:
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        grads = [grad * min(1.0, MAX_NORM / (norm + 1e-6)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


class _Scale:
    """The loss scale of float16."""

    def __init__(self):
        self.value, self.good = SCALE["init_scale"], 0

    def follow(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value *= SCALE["backoff_factor"]
        elif self.good == SCALE["growth_interval"]:
            self.value, self.good = self.value * 2.0, 0
        return finite


class _Average:
    """An EMA with the decay DECAY (1 - exp(-BETA n / N)). The first update copies the weights."""

    def __init__(self, module):
        self.updates = 0
        self.running = [name for name, _ in module.named_buffers()]
        self.values = {n: t.detach().clone() for n, t in module.state_dict().items() if t.is_floating_point()}

    def take(self, module, total):
        self.updates += 1
        decay = 0.0 if self.updates == 1 else DECAY * (1 - math.exp(-BETA * self.updates / total))
        for name, value in module.state_dict().items():
            if name in self.values:
                self.values[name] = decay * self.values[name] + (1 - decay) * value.detach()

    def buffers(self):
        return {name: self.values[name] for name in self.running if name in self.values}


def _agree(shards):
    for name, first in (shards[0] if shards else {}).items():
        if first.is_floating_point():
            mean = torch.stack([shard[name] for shard in shards]).mean(0)
            for shard in shards:
                shard[name].copy_(mean)
