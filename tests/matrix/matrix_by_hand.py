"""Reference implementation for the matrix tests: a plain eager PyTorch loop in one process, without Slipstream."""

import copy
import math
from contextlib import nullcontext
from functools import cache, partial

import torch
import torch.nn.functional as F
from matrix_nets import OPTIMIZERS, STEPS, batches, make

WINDOW, STOP = 3, 10
MAX_NORM = 0.2
DECAY, BETA = 0.9, 15.0
INTERVAL = 2
"""Number of weight updates per update of the SWA average."""
SCALE = dict(init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=4)
"""Loss scale at which only the first step overflows, regardless of rounding."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR_STEPS, MOMENTUM_STEPS = (0.1, 8), (0.5, 16)
"""Initial factor of each schedule, and the step at which the factor reaches 1."""
RHO = 0.3
CLIP_FACTOR, EPS = 0.1, 1e-3
LAYER_FACTOR = 0.5
DEPTHS = {
    "conv": dict(stem=2, norm=2, block=1, head=0),
    "transformer": dict(place=3, stem=2, block=1, norm=0, head=0),
}
"""Exponent of LAYER_FACTOR in each module's learning rate if `stem` and `block` are the layers."""


@cache
def by_hand(net, options, shards):
    """Train with the `options` (a frozenset of names) that change the results.

    With two `shards`, each batch is split into two halves with separate BatchNorm, as in two processes without SyncBN.

    Returns:
        The losses of all steps, and the weights and averages (or None) of each shard.
    """
    torch.manual_seed(0)
    replicas = _replicas(make(net), shards)
    params = list(replicas[0].parameters())
    optimizer = _optimizer(net, replicas[0], options)
    dtype = next((dtype for name, dtype in DTYPES.items() if name in options), None)
    scale = _Scale() if dtype is torch.float16 else None
    decay = next((decay for name, decay in DECAYS.items() if name in options), None)
    averages = [_Average(replica, decay) for replica in replicas] if decay else []
    window = WINDOW if "accumulation" in options else 1
    held, losses = [0.0] * len(params), []
    for number, batch in enumerate(batches()):
        if "scheduler" in options:
            _schedule(optimizer, number)
        size = STEPS % window if window > 1 and number >= STEPS - STEPS % window else window
        run = partial(_run, replicas, params, batch, dtype, size, scale.value if scale else 1.0)
        loss, grads = _sharpness_aware(replicas, params, run) if "SAM" in options else run()
        losses.append(loss)
        held = [sum_ + grad for sum_, grad in zip(held, grads, strict=True)]
        if (number + 1) % window == 0 or number + 1 == STEPS:
            _update(optimizer, params, held, scale, options)
            held = [0.0] * len(params)
            for average, replica in zip(averages, replicas, strict=bool(averages)):
                average.take(replica, math.ceil(STEPS / window))
        if (number + 1) % STOP == 0 and "resume" in options:
            # A checkpoint stores the mean of the processes' BatchNorm statistics.
            _agree([dict(replica.named_buffers()) for replica in replicas])
            _agree([average.buffers() for average in averages])
    weights = [{name: t.detach() for name, t in r.state_dict().items()} for r in replicas]
    return torch.stack(losses), weights, [average.values for average in averages] or None


def _replicas(module, count):
    """Return copies of a network with shared parameters and separate buffers."""
    replicas = [module, *(copy.deepcopy(module) for _ in range(count - 1))]
    for replica in replicas[1:]:
        for mine, first in zip(replica.modules(), module.modules(), strict=True):
            mine._parameters = first._parameters
    return replicas


def _optimizer(net, module, options):
    """Return the optimizer of a network, with one group for each parameter."""
    settings = dict(OPTIMIZERS[net])
    make_optimizer = getattr(torch.optim, settings.pop("type"))
    groups = []
    for name, param in module.named_parameters():
        group = dict(settings, params=[param])
        if "param groups" in options:
            group.update(_own_settings(name, group["lr"]))
        if "layer decay" in options:
            group["lr"] *= LAYER_FACTOR ** DEPTHS[net][name.split(".")[0]]
        groups.append(group)
    return make_optimizer(groups, **settings)


def _own_settings(name, lr):
    if name.startswith("head"):
        return dict(lr=lr * 0.5)
    if "norm" in name:
        return dict(weight_decay=0.0)
    return dict(lr=lr * 2.0) if name.endswith("bias") else {}


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


def _run(replicas, params, batch, dtype, size, scale):
    """Return the loss and the gradients of the scaled loss, both averaged over the shards."""
    losses, grads = [], []
    for shard, replica in enumerate(replicas):
        x, y = (tensor[shard :: len(replicas)] for tensor in batch)
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(replica(x), y)
        grads.append(torch.autograd.grad(loss / size * scale, params))
        losses.append(loss.detach())
    return torch.stack(losses).mean(), [sum(parts) / len(replicas) for parts in zip(*grads, strict=True)]


@torch.no_grad()
def _sharpness_aware(replicas, params, run):
    """Return the loss, and the gradients at the weights after a step of length RHO along the gradient."""
    with torch.enable_grad():
        loss, grads = run()
    changed = [*params, *(buffer for replica in replicas for buffer in replica.buffers())]
    before = [tensor.clone() for tensor in changed]
    norm = _norm(grads)
    for param, grad in zip(params, grads, strict=True):
        param.add_(grad / norm, alpha=RHO)
    with torch.enable_grad():
        _, grads = run()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(old)
    return loss, grads


def _update(optimizer, params, grads, scale, options):
    if scale is not None:
        grads = [grad / scale.value for grad in grads]
        if not scale.follow(all(bool(grad.isfinite().all()) for grad in grads)):
            return
    if "centralization" in options:
        grads = [_centralized(grad) if grad.ndim > 1 else grad for grad in grads]
    if "adaptive clipping" in options:
        grads = [_clipped(grad, param.detach()) for grad, param in zip(grads, params, strict=True)]
    if "clipping" in options:
        factor = min(1.0, MAX_NORM / (_norm(grads) + 1e-6))
        grads = [grad * factor for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


def _norm(grads):
    return sum(float(grad.double().square().sum()) for grad in grads) ** 0.5


def _centralized(grad):
    rows = grad.flatten(1)
    return (rows - rows.mean(1, keepdim=True)).view_as(grad)


def _clipped(grad, param):
    """Return the gradient with each row clipped. A one-dimensional parameter is a single row."""
    grads, weights = (t.flatten(1) if t.ndim > 1 else t[None] for t in (grad, param))
    limits = CLIP_FACTOR * weights.norm(dim=1, keepdim=True).clamp(min=EPS)
    factors = (limits / grads.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return (grads * factors).view_as(grad)


class _Scale:
    """The loss scale for float16."""

    def __init__(self):
        self.value, self.good = SCALE["init_scale"], 0

    def follow(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value *= SCALE["backoff_factor"]
        elif self.good == SCALE["growth_interval"]:
            self.value, self.good = self.value * 2.0, 0
        return finite


def _ema_decay(update, total):
    """Return DECAY * (1 - exp(-BETA * update / total)), or 0 in the first update, which copies the weights."""
    return DECAY * (1 - math.exp(-BETA * update / total)) if update > 1 else 0.0


def _swa_decay(update, total):
    """Return the decay of an arithmetic mean that changes every INTERVAL updates."""
    count, others = divmod(update - 1, INTERVAL)
    return 1.0 if others else count / (count + 1)


DECAYS = {"EMA": _ema_decay, "SWA": _swa_decay}
"""Functions that return the decay of the average in update number `update` of `total` updates."""


class _Average:
    """An average of weights and buffers."""

    def __init__(self, module, decay):
        self.updates, self.decay = 0, decay
        self.running = [name for name, _ in module.named_buffers()]
        self.values = {n: t.detach().clone() for n, t in module.state_dict().items() if t.is_floating_point()}

    def take(self, module, total):
        self.updates += 1
        decay = self.decay(self.updates, total)
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
