"""Random training programs: a network, an optimizer, options, and an order of calls, all from one seed."""

import copy
import dataclasses
import functools
import json
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from generated.networks import KINDS, LAYERS, Net, scores_of


@dataclass(frozen=True)
class Program:
    """A training program. `options` are fields of `SpeedPlan`; `events` are calls before a batch (from 0)."""

    seed: int = 0
    image: bool = False
    layers: tuple[str, ...] = ("mix",)
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
    schedule: str = ""
    """A key of `SCHEDULES`, stepped after each batch."""
    train_step: str = ""
    """How the model of a Runner trains itself, if it does: `update`, `pieces`, `twice`, `super`, or `alternate`, which
    trains the generator of a GAN in every second batch."""

    def __str__(self):
        values, default = dataclasses.asdict(self), dataclasses.asdict(Program())
        return json.dumps({k: v for k, v in values.items() if v != default[k] or k == "seed"})

    @classmethod
    def parse(cls, text):
        """Return the program that `str` has printed."""
        values = json.loads(text)
        events = tuple((number, event) for number, event in values.get("events", ()))
        return cls(**{**values, "layers": tuple(values.get("layers", ["mix"])), "events": events})


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, with a smooth sign, so that it does not amplify rounding errors."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(torch.tanh(average * 9 + p.grad), alpha=group["lr"])
                average.lerp_(p.grad, 0.02)


# A large epsilon, so that adaptive optimizers do not amplify the rounding error of a gradient that is zero.
_EPS = dict(lr=0.01, eps=1e-3)
OPTIMIZERS = {
    "SGD": ("SGD", dict(lr=0.05)),
    "momentum": ("SGD", dict(lr=0.05, momentum=0.9, weight_decay=1e-3)),
    "nesterov": ("SGD", dict(lr=0.05, momentum=0.8, nesterov=True)),
    "dampening": ("SGD", dict(lr=0.05, momentum=0.9, dampening=0.5)),
    "Adam": ("Adam", _EPS),
    "AdamW": ("AdamW", _EPS),
    "foreach": ("SGD", dict(lr=0.05, momentum=0.9, foreach=True)),
    "amsgrad": ("Adam", dict(_EPS, amsgrad=True, weight_decay=1e-2)),
    "NAdam": ("NAdam", _EPS),
    "RAdam": ("RAdam", _EPS),
    "Adamax": ("Adamax", _EPS),
    "Adagrad": ("Adagrad", dict(_EPS, lr=0.05)),
    "RMSprop": ("RMSprop", dict(_EPS, momentum=0.5, centered=True)),
    "Adadelta": ("Adadelta", dict(_EPS, lr=0.5)),
    "ASGD": ("ASGD", dict(lr=0.05)),
    "Lion": (Lion, dict(lr=0.003)),
}
FUSED = list(OPTIMIZERS)[:6]


def _one_cycle(optimizer, total):
    cycles = bool({"momentum", "betas"} & optimizer.defaults.keys())
    return lr_scheduler.OneCycleLR(optimizer, 0.06, total_steps=total, cycle_momentum=cycles)


SCHEDULES = {
    "lambda": lambda optimizer, total: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.2 * n)),
    "one_cycle": _one_cycle,
    "cosine": lr_scheduler.CosineAnnealingLR,
}


# ---- generation -------------------------------------------------------------------------------------------

POSSIBLE = {
    "accumulate": [2, 3, 4],
    "clip_grad": [
        dict(max_norm=0.05), dict(max_norm=10.0), dict(max_norm=0.1, norm_type=1.0),
        dict(max_norm=0.02, norm_type=float("inf")), dict(type="value", clip_value=0.01),
    ],
    "adaptive_clip": [dict(clip_factor=0.05), dict(clip_factor=0.02, exclude=["head"])],
    "gradient_centralization": [True, dict(conv_only=True)],
    "layer_decay": [dict(decay=0.5, layers=["blocks.*"])],
    "sam": [dict(rho=0.05), dict(rho=0.2, adaptive=True, eta=0.1)],
    "ema": [True],
    "precision": ["fp16", "fp16", "bf16"],
    "activation_checkpointing": [["blocks.*"]],
    "channels_last": [True],
    "fused": [True],
    "auto": [True],
}  # fmt: skip
EVENTS = (
    "eval", "eval", "averaged_eval", "save_load", "save_load", "lr", "momentum", "weight_decay", "freeze",
    "unfreeze", "freeze_stem", "eval_block", "train", "add_group", "forward_hook", "weight_hook",
    "accumulate_hook", "remove_hooks", "scale", "shrink_data", "new_data", "zero_grad", "seed", "draw",
    "extra_forward", "rewind", "bad_target", "bad_input", "schedule", "reset_buffers",
)  # fmt: skip
NOT_IN_A_GRAPH = {
    "branch", "random_depth", "numpy_noise", "python_counter", "history", "history_product", "growing", "inference",
    "weight_hook", "backward_hook", "old_spectral", "cumulative_norm", "recurrent", "checkpointed",
    "reentrant_checkpointed",
}  # fmt: skip
"""Layers with which a step is not one graph; half of the programs have none of them."""
NOT_IN_TWO = {"freeze", "freeze_stem", "unfreeze", "add_group", "accumulate_hook", "rewind", "zero_grad"}
NOT_IN_RUNNER = {"eval", "averaged_eval", "extra_forward", "add_group", "schedule", "train"}
FIRST_NEW = 100_000
"""Programs from this seed on also have other schedules and events, several networks, and an own `train_step`."""
NEW_EVENTS = ("inference_eval", "input_gradient", "group_decay", "thaw")
WITH_TWO_OPTIMIZERS = {"accumulate", "clip_grad", "precision", "ema", "fused", "channels_last", "auto"}


def generate(seed, inductor=True, small=False):
    """Return the program of a seed: every fifth runs in a Runner, every twentieth in two processes.

    Args:
        inductor: whether every tenth program is compiled by inductor.
        small: whether to draw fewer layers, batches and compiled programs.
    """
    draw = random.Random(f"slipstream {seed}")
    new = seed >= FIRST_NEW
    runner, two = seed % 5 == 4 or (new and seed % 2 == 0), seed % 40 in (10, 34) and not new
    dtype = "float32" if draw.random() < 0.1 and not two else "float64"
    scope = draw.choice([None] * (5 if small else 2) + ["step", "step", "any", "model", "block"])
    options = _options(draw, runner, two, dtype)
    image = draw.random() < 0.4
    losses = ["mse", "mse", "dict", "list", "model"] + ["module", "penalty", "compute"] * (not runner)
    loss = draw.choice([loss for loss in losses if not (two and loss == "module")])
    forms = ["tuple", "tuple", "dict"] + ["object", "nested"] * (loss in ("penalty", "compute"))
    batches = draw.randint(6, 9 if small else 14)
    epoch = draw.choice([0, 0, draw.randint(3, batches)])
    if options.get("ema", {}).get("count") == "batches" and not runner:
        epoch = 0
    if runner and epoch:
        batches = epoch * max(2, batches // epoch)
    output = draw.choice(["tensor"] * 4 + ["tuple", "dict", "object"] * (not two))
    fused = "fused" in options and draw.random() < 0.9
    program = Program(
        seed=seed,
        image=image,
        layers=_layers(draw, options, two, dtype, image, 2 if small else 5),
        optimizer=draw.choice(FUSED if fused or runner else [*OPTIMIZERS]),
        options=options,
        scope=scope,
        backend="inductor" if inductor and seed % 10 == 3 else "aot_eager",
        dtype=dtype,
        loss=loss,
        output="loss" if loss == "model" else output,
        batch=draw.choice(forms),
        sizes=draw.choice(["constant"] * 3 + ["last", "varying"]),
        batches=batches,
        known_length=draw.random() < 0.6 or options.get("ema", {}).get("type") == "exp",
        change_input=draw.random() < 0.05 and loss != "penalty" and "sam" not in options,
        through="runner" if runner else "accelerate",
        epoch=epoch,
        processes=1 + two,
    )
    program = dataclasses.replace(program, events=_events(draw, program))
    return _extended(random.Random(f"slipstream, more {seed}"), program) if new else program


def _extended(draw, program):
    """Return the program with features of later seeds."""
    runner, options, scope = program.through == "runner", dict(program.options), program.scope
    train_step = draw.choice(["", "update", "update", "pieces", "twice", "super"]) if runner else ""
    losses = ["mse"] if train_step else [program.loss]
    losses += ["gan"] * (train_step in ("update", "pieces")) + ["two", "teacher", "aux", "gan"] * (not runner)
    loss = draw.choice(losses)
    if loss == "gan" and runner:
        train_step = draw.choice([train_step, "alternate"])
    if loss == "gan":
        options = {name: value for name, value in options.items() if name in WITH_TWO_OPTIMIZERS}
    if train_step:
        options.pop("sam", None)
        scope = draw.choice([None, "any", "model", "block"]) if scope else None
    if train_step == "twice":
        options.pop("accumulate", None)
    schedule = draw.choice(["", *SCHEDULES])
    fixed = schedule or "reentrant_checkpointed" in program.layers
    left_out = {"add_group", "thaw", "schedule"} if fixed else set()
    if not ("nan_guard" in options or options.get("precision") == "fp16"):
        left_out |= {"bad_target", "bad_input"}
    new = [(draw.randrange(1, program.batches), draw.choice(NEW_EVENTS)) for _ in range(draw.randint(0, 3))]
    events = [*program.events, *(event for event in new if not runner or event[1] == "group_decay")]
    return dataclasses.replace(
        program,
        loss=loss,
        output=program.output if loss == program.loss or program.output != "loss" else "tensor",
        options=options,
        scope=scope,
        schedule=schedule,
        train_step=train_step,
        events=tuple(sorted(event for event in events if event[1] not in left_out)),
        change_input=program.change_input and loss == program.loss and not train_step,
    )


def _options(draw, runner, two, dtype):
    chosen = draw.sample([*POSSIBLE], draw.choice([0, 1, 1, 2, 2, 3, 4]))
    if dtype == "float32":
        # SAM amplifies the rounding errors of half precision beyond any useful tolerance.
        chosen = [name for name in chosen if name not in ("sam", "precision")] + ["precision"]
    options = {name: draw.choice(POSSIBLE[name]) for name in chosen}
    if "ema" in options:
        kind = draw.choice(["constant", "threshold", "exp", "swa"])
        possible = dict(
            interval=2, begin_iter=draw.randint(1, 5), **(dict(count="batches") if kind != "swa" else {})
        )
        options["ema"] = dict(type=kind) | {k: v for k, v in possible.items() if draw.random() < 0.3}
        options["ema"] |= {"swa": {}, "exp": dict(decay=0.7, beta=5.0)}.get(kind, dict(decay=0.7))
    if draw.random() < (0.4 if runner else 0.2):
        options["nan_guard"] = "skip"
    return options | ({"sync_bn": True} if two and draw.random() < 0.5 else {})


def _layers(draw, options, two, dtype, image, most):
    left_out = set()
    if "activation_checkpointing" in options:
        left_out |= KINDS["python"] | KINDS["hooked"]
    if dtype == "float32":
        left_out |= KINDS["random"] | KINDS["discontinuous"]
    if "channels_last" in options and image:
        left_out |= KINDS["random"]  # random numbers are drawn in the order of the memory
    if two:
        left_out |= KINDS["untrained"]
    if draw.random() < 0.5:
        left_out |= NOT_IN_A_GRAPH
    return tuple(draw.choices([name for name in LAYERS if name not in left_out], k=draw.randint(1, most)))


def _events(draw, program):
    left_out = set()
    if "ema" not in program.options:
        left_out.add("averaged_eval")
    guarded = "nan_guard" in program.options or program.options.get("precision") == "fp16"
    if not guarded or program.dtype == "float32":
        left_out |= {"bad_target", "bad_input"}
    if "sam" in program.options:
        left_out.add("accumulate_hook")
    if "reentrant_checkpointed" in program.layers:
        left_out.add("add_group")  # backward then also computes the gradients of other parameters
    left_out |= NOT_IN_TWO if program.processes > 1 else set()
    left_out |= NOT_IN_RUNNER if program.through == "runner" else set()
    events = [event for event in EVENTS if event not in left_out]
    count = draw.choice([0, 1, 2, 3, 4])
    return tuple(sorted((draw.randrange(1, program.batches), draw.choice(events)) for _ in range(count)))


# ---- what a program consists of ---------------------------------------------------------------------------


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class ModuleLoss(nn.Module):
    """A loss with a parameter and a buffer; a graph does not support 0-dim tensors of float64."""

    def __init__(self, *shape):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(shape))
        self.register_buffer("calls", torch.zeros(shape))

    def forward(self, outputs, y):
        self.calls += 1
        return (_mse(outputs, y) * torch.exp(-self.log_scale) + self.log_scale).sum()


def _other_module(program):
    """Return the module that `compute_loss` uses besides the model, or None."""
    if program.loss in ("two", "gan"):
        last = 1 if program.loss == "gan" else 3
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, last))
    if program.loss == "teacher":
        return Net(("mix", "norm"), program.image).requires_grad_(False).eval()
    return ModuleLoss(1) if program.loss == "aux" else None


class Objects:
    """The objects of a user's script: models, optimizers, loss, schedule, and the hooks that events add.

    Args:
        net: the class of the model.
    """

    def __init__(self, program, rank=0, dtype=None, net=Net):
        self.program, self.handles, self.outputs, self.added = program, [], [], []
        seed_all(program.seed % 1000)
        kind = getattr(torch, dtype or program.dtype)
        self.model = model = net(program.layers, program.image, program.output, program.change_input).to(kind)
        self.loss = ModuleLoss().to(kind) if program.loss == "module" else None
        self.initial = copy.deepcopy(model.state_dict())
        names = {event for _, event in program.events}
        later = [*model.extra.parameters()] if "add_group" in names else []
        later += [*model.stem.requires_grad_(False).parameters()] if "thaw" in names else []
        head = [*model.head.parameters()]
        rest = [p for p in model.parameters() if not any(p is other for other in [*head, *later])]
        loss_params = [] if self.loss is None else [*self.loss.parameters()]
        self.other = other = _other_module(program)
        if other is not None:
            other.to(kind)
        loss_params += [*other.parameters()] if program.loss in ("two", "aux") else []
        groups = [dict(params=rest), dict(params=head + loss_params, lr=0.02)]
        kind, options = OPTIMIZERS[program.optimizer]
        make = getattr(torch.optim, kind) if isinstance(kind, str) else kind
        if program.through == "runner":  # builds the optimizer itself, with one group
            groups = [dict(params=[*model.parameters()])]
        self.optimizer = make(groups, **options)
        self.optimizers = [self.optimizer]
        if program.loss == "gan":
            self.optimizers.append(make(other.parameters(), **options))
            if program.through == "runner":
                model.critic = other
        self.schedule = None
        if program.schedule:
            self.schedule = SCHEDULES[program.schedule](self.optimizer, program.batches)
        elif "schedule" in names:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        seed_all(program.seed % 1000 + 1 + rank)

    @torch.no_grad()
    def apply(self, event):
        """Run the code of an event, as a user would write it."""
        model, groups = self.model, self.optimizer.param_groups
        block, head = model.blocks[-1], model.head
        if event in ("eval", "inference_eval", "input_gradient"):
            modes = [module.training for module in model.modules()]
            model.eval()
            with torch.inference_mode() if event == "inference_eval" else nullcontext():
                result = (
                    self.input_gradient() if event == "input_gradient" else scores_of(model(self.inputs()))
                )
            self.outputs.append(result.detach().clone())
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode
        elif event == "momentum":
            for group in groups:
                group.update({"momentum": group["momentum"] * 0.9} if "momentum" in group else {})
                group.update({"betas": (0.8, group["betas"][1])} if "betas" in group else {})
        elif event in ("add_group", "thaw"):
            if event not in self.added:
                self.added.append(event)
                part, options = (
                    (model.extra, {}) if event == "add_group" else (model.stem, dict(weight_decay=0.02))
                )
                self.optimizer.add_param_group(dict(params=[*part.requires_grad_().parameters()], **options))
        elif event == "remove_hooks":
            while self.handles:
                self.handles.pop().remove()
        elif event == "reset_buffers":
            for buffer in (b for b in model.buffers() if b.is_floating_point() and b.ndim == 1):
                buffer.zero_()
        elif event == "new_data":
            head.weight.data = head.weight.data.clone() * 0.9
        elif event == "scale":
            block.scale = 0.3
        else:
            calls = {
                "lr": lambda: [group.update(lr=group["lr"] * 0.5) for group in groups],
                "weight_decay": lambda: [group.update(weight_decay=0.01) for group in groups],
                "group_decay": lambda: groups[-1].update(weight_decay=0.02),
                "freeze": lambda: block.requires_grad_(False),
                "freeze_stem": lambda: model.stem.requires_grad_(False),
                "unfreeze": lambda: model.requires_grad_(True),
                "eval_block": block.eval,
                "train": model.train,
                "forward_hook": lambda: self.handles.append(block.register_forward_hook(_more)),
                "weight_hook": lambda: self.handles.append(
                    head.weight.register_hook(lambda grad: grad * 0.5)
                ),
                "accumulate_hook": lambda: self.handles.append(
                    head.bias.register_post_accumulate_grad_hook(_halve)
                ),
                "shrink_data": lambda: head.weight.mul_(0.9),
                "zero_grad": self.optimizer.zero_grad,
                "seed": lambda: seed_all(11),
                "draw": lambda: (torch.rand(3), np.random.rand(), random.random()),
                "extra_forward": lambda: model(self.inputs()),
                "rewind": lambda: model.load_state_dict(self.initial),
            }
            calls.get(event, lambda: None)()

    @torch.no_grad()
    def after_batch(self):
        """Step the schedule, and let a teacher follow the model."""
        if self.schedule is not None:
            self.schedule.step()
        if self.program.loss == "teacher":
            for name in ("stem", "head"):
                parts = getattr(self.other, name), getattr(self.model, name)
                torch._foreach_lerp_(*([*part.parameters()] for part in parts), 0.5)

    @torch.enable_grad()
    def input_gradient(self):
        x = self.inputs().requires_grad_()
        return torch.autograd.grad(scores_of(self.model(x)).sum(), x)[0]

    def inputs(self):
        """Return the inputs of an evaluation."""
        return make_batch(self.program, 1000, dtype=self.model.stem.weight.dtype).x


def _more(module, arguments, output):
    return output * 1.1


def _halve(param):
    param.grad.mul_(0.5)


def seed_all(number):
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
    if (index, "bad_input") in program.events:
        x.view(-1)[0] = torch.inf
    if (index, "bad_target") in program.events:
        y[0, 0] = torch.nan
    kind = dtype or getattr(torch, program.dtype)
    return Sample(x.to(kind), y.to(kind))


def in_form(program, sample):
    """Return a sample in the program's form of a batch."""
    x, y = sample.x, sample.y
    return dict(
        tuple=(x, y), dict=dict(x=x, y=y), object=sample, nested=dict(images=[x], meta=dict(y=y, name="a"))
    )[program.batch]


def out_of_form(batch):
    """Return the `Sample` of a batch in any form."""
    if isinstance(batch, dict):
        return (
            Sample(batch["x"], batch["y"]) if "x" in batch else Sample(batch["images"][0], batch["meta"]["y"])
        )
    return batch if isinstance(batch, Sample) else Sample(*batch)


def loss_function(program, objects):
    """Return `loss_fn(outputs, targets)`, or None."""
    return {"module": objects.loss, "dict": _dict_loss, "list": _list_loss, "mse": _mse}.get(program.loss)


def batch_loss(program, objects):
    """Return `compute_loss(model, batch)`, or None."""
    found = {
        "penalty": _penalty, "compute": _compute, "two": _two_losses, "teacher": _teacher_loss, "aux": _aux_loss,
        "gan": generator_loss,
    }.get(program.loss)  # fmt: skip
    return functools.partial(found, other=objects.other) if found and objects.other else found


def turn_loss(model, critic, batch, turn):
    """Return the loss of a turn of an own `train_step`, which trains the critic first if there is one."""
    if critic is not None:
        critic.requires_grad_(turn == 0)
        return critic_loss(critic, batch, model) if turn == 0 else generator_loss(model, batch, critic)
    sample = out_of_form(batch)
    return F.mse_loss(scores_of(model(sample.x * 0.5**turn)), sample.y)


def critic_loss(critic, batch, model):
    sample = out_of_form(batch)
    with torch.no_grad():
        made = scores_of(model(sample.x))
    return F.softplus(-critic(sample.y)).mean() + F.softplus(critic(made)).mean()


def generator_loss(model, batch, other):
    sample = out_of_form(batch)
    scores = scores_of(model(sample.x))
    return F.mse_loss(scores, sample.y) + 0.1 * F.softplus(-other(scores)).mean()


def _two_losses(model, batch, other):
    sample = out_of_form(batch)
    scores = scores_of(model(sample.x))
    return {"loss_a": F.mse_loss(scores, sample.y), "loss_b": 0.3 * F.mse_loss(other(scores), sample.y)}


def _teacher_loss(model, batch, other):
    sample = out_of_form(batch)
    with torch.no_grad():
        target = other(sample.x)
    scores = scores_of(model(sample.x))
    return F.mse_loss(scores, sample.y) + 0.5 * F.mse_loss(scores, target)


def _aux_loss(model, batch, other):
    sample = out_of_form(batch)
    return other(model(sample.x), sample.y)


def _targets(y):
    return y["y"] if isinstance(y, dict) else y


def _mse(outputs, y):
    return F.mse_loss(scores_of(outputs), _targets(y))


def _dict_loss(outputs, y):
    scores, y = scores_of(outputs), _targets(y)
    return {
        "loss_a": F.mse_loss(scores, y),
        "loss_b": 0.1 * F.smooth_l1_loss(scores, y),
        "norm": scores.detach().norm(),
    }


def _list_loss(outputs, y):
    return {"loss_all": [F.mse_loss(s, t) for s, t in zip(scores_of(outputs), _targets(y), strict=True)]}


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
    """Yield programs that lack parts of `program`, the largest reductions first."""
    change = functools.partial(dataclasses.replace, program)
    layers, options, events = program.layers, program.options, program.events
    if len(layers) > 1 or options or events:
        for name in layers if program.dtype == "float64" else ():
            yield change(layers=(name,), options={}, events=())
    if len(layers) > 1:
        yield change(layers=("mix",))
        yield from (change(layers=layers[:i] + layers[i + 1 :]) for i in range(len(layers)))
    if program.processes > 1:
        yield change(processes=1)
    if program.through == "runner":
        yield change(through="accelerate", train_step="")
    for name in options if program.dtype == "float64" else ():
        yield change(options={k: v for k, v in options.items() if k != name})
    yield from (change(events=events[:i] + events[i + 1 :]) for i in range(len(events)))
    simple = {f.name: f.default for f in dataclasses.fields(Program)}
    yield change(loss="mse", output="tensor", batch="tuple")
    yield change(output="loss" if program.loss == "model" else "tensor")
    for name in (
        "image",
        "optimizer",
        "dtype",
        "sizes",
        "epoch",
        "known_length",
        "change_input",
        "scope",
        "backend",
        "schedule",
        "train_step",
    ):
        yield change(**{name: simple[name]})
    if len(layers) == 1:
        yield change(layers=("mix",))
    last = max((number for number, _ in events), default=0)
    if program.through != "runner" and program.batches > last + 2:
        yield change(batches=max(last + 2, program.batches // 2))
        yield change(batches=program.batches - 1)
