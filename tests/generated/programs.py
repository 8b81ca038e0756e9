"""Random training programs: a network, an optimizer, options, and an order of calls, all from one seed."""

import dataclasses
import functools
import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from generated.networks import DISCONTINUOUS, HOOKED, LAYERS, PYTHON_STATE, RANDOM, UNTRAINED, Net, scores_of


@dataclass(frozen=True)
class Program:
    """A training program. `options` are the fields of `SpeedPlan`; `events` are calls before a batch (from 0)."""

    seed: int = 0
    image: bool = False
    layers: tuple[str, ...] = ("Mix",)
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=dict)
    scope: str | None = None
    backend: str = "aot_eager"
    dtype: str = "float64"
    loss: str = "mse"
    output: str = "tensor"
    batch: str = "tuple"
    sizes: str = "constant"
    batches: int = 8
    known_length: bool = True
    change_input: bool = False
    events: tuple[tuple[int, str], ...] = ()
    through: str = "accelerate"
    epoch: int = 0
    """Batches per epoch; 0 for a single epoch (with a Runner: an iteration-based run)."""
    processes: int = 1

    def __str__(self):
        default = Program()
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({k: v for k, v in shown.items() if v != getattr(default, k) or k == "seed"})

    @classmethod
    def parse(cls, text):
        values = json.loads(text)
        for name in ("layers", "events"):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in values.get(name, ()))
        return cls(**values)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS, amsgrad=True, weight_decay=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=EPS),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=EPS),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=EPS),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=EPS),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=EPS, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=EPS),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Lion": lambda p: Lion(p, lr=0.003),
}
EPS = 1e-3
"""A large epsilon, so that adaptive optimizers do not amplify the rounding error of a gradient that is zero."""
IN_RUNNER = {
    "SGD": dict(type="SGD", lr=0.05),
    "momentum": dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": dict(type="SGD", lr=0.05, momentum=0.8, nesterov=True),
    "dampening": dict(type="SGD", lr=0.05, momentum=0.9, dampening=0.5),
    "Adam": dict(type="Adam", lr=0.01, eps=EPS),
    "AdamW": dict(type="AdamW", lr=0.01, eps=EPS),
    "RMSprop": dict(type="RMSprop", lr=0.01, eps=EPS, momentum=0.5, centered=True),
}


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, with a smooth sign, so that it does not amplify rounding errors."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"] * 0.9 + p.grad * 0.1
                p.sub_(torch.tanh(update * 10), alpha=group["lr"])
                state["average"].lerp_(p.grad, 0.02)


# ---- generation -------------------------------------------------------------------------------------------

_BOTH_WAYS = (True, False)


def generate(seed, inductor=True, small=False):
    """Return the program of a seed: every fifth runs in a Runner, every twentieth in two processes."""
    draw = random.Random(f"slipstream {seed}")
    runner, processes = seed % 5 == 4, 2 if seed % 40 in (10, 34) else 1
    dtype = "float32" if draw.random() < 0.1 and processes == 1 else "float64"
    image = draw.random() < 0.4
    scope = draw.choice([None, None, "step", "step", "any", "model", "block"])
    options = _options(draw, runner, processes, dtype)
    names = _layers(draw, options, processes, dtype, 3 if small else 5)
    loss = draw.choice(["mse", "mse", "dict", "list", "module", "penalty", "model", "compute"])
    if runner and loss in ("penalty", "compute", "module"):
        loss = "mse"
    if processes > 1 and loss == "module":
        loss = "mse"
    batch = draw.choice(["tuple", "tuple", "dict", "object", "nested"] if loss in ("penalty", "compute") else
                        ["tuple", "tuple", "dict"])  # fmt: skip
    output = "loss" if loss == "model" else draw.choice(["tensor"] * 4 + ["tuple", "dict", "object"])
    if loss == "model":
        batch = draw.choice(["tuple", "dict"])
    batches = draw.randint(6, 9 if small else 14)
    epoch = draw.choice([0, 0, draw.randint(3, batches)])
    if runner and epoch:
        batches = epoch * max(2, batches // epoch)
    optimizer = draw.choice([*(IN_RUNNER if runner else OPTIMIZERS)])
    program = Program(
        seed=seed, image=image, layers=names, optimizer=optimizer, options=options, scope=scope,
        backend="inductor" if inductor and seed % 10 == 3 else "aot_eager", dtype=dtype, loss=loss,
        output=output if processes == 1 else output.replace("tuple", "tensor").replace("dict", "tensor").
        replace("object", "tensor"),
        batch=batch, sizes=draw.choice(["constant"] * 3 + ["last", "varying"]), batches=batches,
        known_length=draw.random() < 0.6 or options.get("ema", {}).get("type") == "exp",
        change_input=draw.random() < 0.05 and loss != "penalty" and "sam" not in options,
        through="runner" if runner else "accelerate", epoch=epoch, processes=processes,
    )  # fmt: skip
    if "ema" in options and options["ema"].get("count") == "batches" and epoch and not runner:
        program = dataclasses.replace(program, epoch=0)
    return dataclasses.replace(program, events=_events(draw, program))


def _options(draw, runner, processes, dtype):
    possible = {
        "accumulate": lambda: draw.choice([2, 3, 4]),
        "clip_grad": lambda: draw.choice([
            dict(max_norm=0.05), dict(max_norm=10.0), dict(max_norm=0.1, norm_type=1.0),
            dict(max_norm=0.02, norm_type=float("inf")), dict(type="value", clip_value=0.01),
        ]),
        "adaptive_clip": lambda: draw.choice([dict(clip_factor=0.05), dict(clip_factor=0.02, exclude=["head"])]),
        "gradient_centralization": lambda: draw.choice([True, dict(conv_only=True)]),
        "layer_decay": lambda: dict(decay=0.5, layers=["blocks.*"]),
        "sam": lambda: draw.choice([dict(rho=0.05), dict(rho=0.2, adaptive=True, eta=0.1)]),
        "ema": lambda: _ema(draw),
        "precision": lambda: draw.choice(["fp16", "fp16", "bf16"]),
        "activation_checkpointing": lambda: ["blocks.*"],
        "channels_last": lambda: True,
        "fused": lambda: True,
        "auto": lambda: True,
    }  # fmt: skip
    count = draw.choice([0, 1, 1, 2, 2, 3, 4])
    chosen = draw.sample([*possible], count)
    if dtype == "float32":
        # SAM and clipping of values amplify the rounding errors of half precision beyond any useful tolerance.
        chosen = [name for name in chosen if name not in ("sam", "precision")] + ["precision"]
    options = {name: possible[name]() for name in chosen}
    if runner and draw.random() < 0.4:
        options["nan_guard"] = "skip"
    if processes > 1 and draw.random() < 0.5:
        options["sync_bn"] = True
    return options


def _ema(draw):
    kind = draw.choice(["constant", "threshold", "exp", "swa"])
    ema = dict(type=kind)
    if kind != "swa":
        ema["decay"] = 0.7
    if kind == "exp":
        ema["beta"] = 5.0
    if draw.random() < 0.3:
        ema["interval"] = 2
    if draw.random() < 0.3:
        ema["begin_iter"] = draw.randint(1, 5)
    if draw.random() < 0.3 and kind != "swa":
        ema["count"] = "batches"
    return ema


def _layers(draw, options, processes, dtype, most):
    left_out = set()
    if "activation_checkpointing" in options:
        left_out |= PYTHON_STATE | HOOKED
    if dtype == "float32":
        left_out |= RANDOM | DISCONTINUOUS
    if processes > 1:
        left_out |= UNTRAINED | {"ReentrantCheckpointed"}
    return tuple(draw.choices([name for name in LAYERS if name not in left_out], k=draw.randint(1, most)))


EVENTS = (
    "eval", "eval", "averaged_eval", "save_load", "save_load", "lr", "momentum", "weight_decay", "freeze",
    "unfreeze", "freeze_stem", "eval_block", "train", "add_group", "forward_hook", "weight_hook",
    "accumulate_hook", "remove_hooks", "scale", "shrink_data", "new_data", "zero_grad", "seed", "draw",
    "extra_forward", "rewind", "bad_target", "bad_input", "schedule", "reset_buffers",
)  # fmt: skip
_ONLY_ALONE = {"freeze", "freeze_stem", "unfreeze", "add_group", "accumulate_hook", "rewind", "zero_grad"}


def _events(draw, program):
    guarded = "nan_guard" in program.options or program.options.get("precision") == "fp16"
    found = []
    for _ in range(draw.choice([0, 1, 2, 3, 4])):
        event = draw.choice(EVENTS)
        if event == "averaged_eval" and ("ema" not in program.options or program.through == "runner"):
            continue
        if event.startswith("bad") and not guarded:
            continue
        if program.processes > 1 and event in _ONLY_ALONE:
            continue
        if program.through == "runner" and event in (
            "eval",
            "extra_forward",
            "add_group",
            "schedule",
            "train",
        ):
            continue
        if program.dtype == "float32" and event.startswith("bad"):
            continue
        found.append((draw.randrange(1, program.batches), event))
    return tuple(sorted(found))


# ---- what a program consists of ---------------------------------------------------------------------------


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class ModuleLoss(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, y):
        self.calls += 1
        y = y["y"] if isinstance(y, dict) else y
        return F.mse_loss(scores_of(outputs), y) * torch.exp(-self.log_scale) + self.log_scale


class Objects:
    """The objects of a user's script: model, optimizer, loss, schedule, and the hooks that events add."""

    def __init__(self, program, rank=0, dtype=None):
        self.program = program
        seed(program.seed % 1000)
        kind = getattr(torch, dtype or program.dtype)
        self.model = Net(program.layers, program.image, program.output, program.change_input).to(kind)
        self.loss = ModuleLoss().to(kind) if program.loss == "module" else None
        extra = {id(p) for p in self.model.extra.parameters()} if _adds_group(program) else set()
        params = [p for p in self.model.parameters() if id(p) not in extra]
        head = {id(p) for p in self.model.head.parameters()}
        groups = [
            dict(params=[p for p in params if id(p) not in head]),
            dict(params=[p for p in params if id(p) in head], lr=0.02),
        ]
        if self.loss is not None:
            groups[1]["params"] += self.loss.parameters()
        if program.through == "runner":
            groups = [dict(params=params)]
        self.optimizer = OPTIMIZERS[program.optimizer](groups)
        self.schedule = None
        if any(event == "schedule" for _, event in program.events):
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.handles = []
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.outputs = []
        seed(program.seed % 1000 + 1 + rank)

    def apply(self, event):
        """Run the code of an event, as a user would write it."""
        model, groups = self.model, self.optimizer.param_groups
        target = model.blocks[-1] if len(model.blocks) else model.stem
        if event == "eval":
            was = model.training
            model.eval()
            with torch.no_grad():
                self.outputs.append(scores_of(model(self.inputs())).detach().clone())
            model.train(was)
        elif event == "extra_forward":
            with torch.no_grad():
                model(self.inputs())
        elif event == "lr":
            for group in groups:
                group["lr"] *= 0.5
        elif event == "momentum":
            for group in groups:
                if "momentum" in group:
                    group["momentum"] *= 0.9
                if "betas" in group:
                    group["betas"] = (0.8, group["betas"][1])
        elif event == "weight_decay":
            for group in groups:
                group["weight_decay"] = 0.01
        elif event in ("freeze", "freeze_stem"):
            (target if event == "freeze" else model.stem).requires_grad_(False)
        elif event == "unfreeze":
            model.requires_grad_(True)
        elif event == "eval_block":
            target.eval()
        elif event == "train":
            model.train()
        elif event == "add_group" and not self.has_group():
            self.optimizer.add_param_group(dict(params=list(model.extra.parameters())))
        elif event == "forward_hook":
            self.handles.append(target.register_forward_hook(lambda module, args, out: out * 1.1))
        elif event == "weight_hook":
            self.handles.append(model.head.weight.register_hook(lambda grad: grad * 0.5))
        elif event == "accumulate_hook":
            self.handles.append(model.head.bias.register_post_accumulate_grad_hook(_halve))
        elif event == "remove_hooks":
            while self.handles:
                self.handles.pop().remove()
        elif event == "scale":
            target.scale = 0.3
        elif event == "shrink_data":
            with torch.no_grad():
                model.head.weight.mul_(0.9)
        elif event == "new_data":
            model.head.weight.data = model.head.weight.data.clone() * 0.9
        elif event == "zero_grad":
            self.optimizer.zero_grad()
        elif event == "seed":
            seed(11)
        elif event == "draw":
            torch.rand(3), np.random.rand(), random.random()
        elif event == "rewind":
            model.load_state_dict(self.initial)
        elif event == "reset_buffers":
            for buffer in model.buffers():
                if buffer.is_floating_point() and buffer.ndim == 1:
                    buffer.zero_()

    def has_group(self):
        return any(p is self.model.extra.weight for g in self.optimizer.param_groups for p in g["params"])

    def inputs(self):
        return make_batch(self.program, 1000, dtype=self.model.stem.weight.dtype).x


def _halve(param):
    param.grad *= 0.5


def _adds_group(program):
    return any(event == "add_group" for _, event in program.events)


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def make_batch(program, index, rank=0, dtype=None):
    """Return the sample of a batch, whose values depend on the seed, the number of the batch and the rank only."""
    if program.through == "runner" and program.epoch and index < program.batches:
        index %= program.epoch
    generator = torch.Generator().manual_seed(program.seed * 7919 + index * 31 + rank)
    size, side = 4, 4
    if program.sizes == "last" and (index + 1) % (program.epoch or program.batches) == 0:
        size = 3
    if program.sizes == "varying":
        size, side = 3 + index % 3, 4 + index % 2
    shape = (size, 3, side, side) if program.image else (size, 4)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    for number, event in program.events:
        if number == index and event == "bad_input":
            x.view(-1)[0] = torch.inf
        if number == index and event == "bad_target":
            y[0, 0] = torch.nan
    kind = dtype or getattr(torch, program.dtype)
    return Sample(x.to(kind), y.to(kind))


def in_form(program, sample):
    """Return a sample in the program's form of a batch."""
    x, y = sample.x, sample.y
    return {
        "tuple": lambda: (x, y),
        "dict": lambda: {"x": x, "y": y},
        "object": lambda: Sample(x, y),
        "nested": lambda: {"images": [x], "meta": {"y": y, "name": "a"}},
    }[program.batch]()


def out_of_form(batch):
    """Return the `Sample` of a batch in any form."""
    if isinstance(batch, Sample):
        return batch
    if isinstance(batch, dict):
        return (
            Sample(batch["x"], batch["y"]) if "x" in batch else Sample(batch["images"][0], batch["meta"]["y"])
        )
    return Sample(*batch)


def _targets(y):
    return y["y"] if isinstance(y, dict) else y


def loss_function(program, objects):
    """Return `loss_fn(outputs, targets)`, or None."""
    if program.loss == "module":
        return objects.loss
    if program.loss == "dict":
        return _dict_loss
    if program.loss == "list":
        return _list_loss
    return _mse if program.loss == "mse" else None


def _mse(outputs, y):
    return F.mse_loss(scores_of(outputs), _targets(y))


def _dict_loss(outputs, y):
    return {
        "loss_a": F.mse_loss(scores_of(outputs), _targets(y)),
        "loss_b": 0.1 * F.smooth_l1_loss(scores_of(outputs), _targets(y)),
        "norm": scores_of(outputs).detach().norm(),
    }


def _list_loss(outputs, y):
    return {"loss_all": [F.mse_loss(s, t) for s, t in zip(scores_of(outputs), _targets(y), strict=True)]}


def batch_loss(program):
    """Return `compute_loss(model, batch)`, or None."""
    functions = {"penalty": _penalty, "compute": _compute}
    return functions.get(program.loss)


def _compute(model, batch):
    sample = out_of_form(batch)
    return (
        F.mse_loss(scores_of(model(sample.x)), sample.y)
        + 0.01 * scores_of(model(sample.x * 0.5)).square().mean()
    )


def _penalty(model, batch):
    sample = out_of_form(batch)
    x = sample.x.detach().requires_grad_()
    scores = scores_of(model(x))
    (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.mse_loss(scores, sample.y) + 0.1 * grad.square().sum()


# ---- shrinking --------------------------------------------------------------------------------------------


def smaller(program):
    """Yield programs that lack one part of `program`, the largest reductions first."""
    change = functools.partial(dataclasses.replace, program)
    if program.processes > 1:
        yield change(processes=1)
    if program.through == "runner" and "nan_guard" not in program.options:
        yield change(through="accelerate")
    for index in range(len(program.layers) if len(program.layers) > 1 else 0):
        yield change(layers=program.layers[:index] + program.layers[index + 1 :])
    for name in program.options:
        yield change(options={key: value for key, value in program.options.items() if key != name})
    for index in range(len(program.events)):
        yield change(events=program.events[:index] + program.events[index + 1 :])
    if program.layers != ("Mix",) and len(program.layers) == 1:
        yield change(layers=("Mix",))
    defaults = Program(seed=program.seed)
    for name in ("image", "optimizer", "dtype", "sizes", "epoch", "known_length", "change_input"):
        if getattr(program, name) != getattr(defaults, name):
            yield change(**{name: getattr(defaults, name)})
    if (program.loss, program.output, program.batch) != ("mse", "tensor", "tuple"):
        yield change(loss="mse", output="tensor", batch="tuple")
        yield change(output=program.output if program.loss == "model" else "tensor")
    if program.scope is not None:
        yield change(scope=None)
    if program.backend == "inductor":
        yield change(backend="aot_eager")
    for name, value in program.options.items():
        if isinstance(value, dict):
            for key in value:
                yield change(options={**program.options, name: {k: v for k, v in value.items() if k != key}})
    last = max((number for number, _ in program.events), default=0)
    if program.through != "runner" and program.batches > last + 2:
        yield change(batches=max(last + 2, program.batches // 2))
        yield change(batches=program.batches - 1)
