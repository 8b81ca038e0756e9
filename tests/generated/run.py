"""Run programs through Slipstream's public functions, and judge the results by the plain loop."""

import contextlib
import copy
import functools
import logging
import os
import signal
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from generated import programs
from generated.oracle import Loop, finish, tensors
from generated.programs import Objects, generate, make_batch, scores_of, smaller
from ports import free_port
from slipstream import accelerate
from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.evaluator import BaseMetric
from slipstream.hooks import EMAHook, Hook
from slipstream.logging import MessageHub
from slipstream.model import BaseModel
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.runner import Runner
from slipstream.speed.steps import compiled_scope

PASSED = ("ok", "refused", "invalid")
EAGER, COMPILED = 1e-9, 1e-7
"""Relative tolerances in float64."""
HALF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative rounding error under autocast; the tolerance is this error and four times the difference between the plain
loop in this precision and in float64."""


@dataclass
class Result:
    verdict: str
    """`ok`, `refused`, `wrong`, `foreign` (an exception that is not Slipstream's), `crash`, or `invalid`."""
    detail: str = ""
    ran: str = "eager"
    """The scope that was compiled at the end."""


def _compile(program, blocks=("blocks.*",)):
    if program.scope is None:
        return {}
    options = dict(backend=program.backend, cache=False)
    if program.scope != "any":
        options["scope"] = program.scope
    if program.scope == "block":
        options["blocks"] = [*blocks]
    return {"compile": options}


class Own:
    """A run of a program with `accelerate`."""

    def __init__(self, program, folder, rank=0):
        self.program, self.folder, self.rank = program, folder, rank
        self.record, self.ran, self.outputs = [], "eager", []
        self._start()

    def _start(self):
        program = self.program
        self.objects = Objects(program, self.rank)
        self.objects.outputs = self.outputs

    def _accelerate(self):
        program, objects = self.program, self.objects
        self.step = accelerate(
            objects.model,
            objects.optimizer,
            programs.loss_function(program, objects),
            {**program.options, **_compile(program)},
            total_steps=program.batches if program.known_length else None,
            batches_per_epoch=program.epoch or None,
            compute_loss=programs.batch_loss(program, objects),
        )
        self.critic = None
        if program.loss == "gan":
            options = {k: v for k, v in program.options.items() if k != "ema"}
            options |= _compile(program, blocks=["0"])
            loss = functools.partial(programs.critic_loss, model=objects.model)
            sizes = program.batches if program.known_length else None, program.epoch or None
            self.critic = accelerate(objects.other, objects.optimizers[1], None, options, *sizes, loss)

    def run(self):
        program = self.program
        self._accelerate()
        for batch in range(program.batches):
            for number, event in program.events:
                if number == batch:
                    self._event(event)
            sample = programs.in_form(program, make_batch(program, batch, self.rank))
            if self.critic is not None:
                self.critic(sample)
            log = self.step(sample)
            self.record.append((f"loss[{batch}]", log["loss"].clone()))
            self.record.append((f"updated[{batch}]", self.step.updated))
            self.objects.after_batch()
        self.record += finish(self.objects)
        if self.step.average is not None and self.step.average.steps:
            self.record += averages(self.step.average)
        self.ran = ran(self.step.inner, self.step.compiled_scope)
        self.step.close()
        return self.record

    def _parts(self):
        """Return the objects that `save` does not include."""
        parts = dict(schedule=self.objects.schedule, other=self.objects.other, critic=self.critic)
        return {name: part for name, part in parts.items() if part is not None}

    def _event(self, event):
        if event == "save_load":
            path = self.folder / "state.pth"
            self.step.save(path, **{name: part.state_dict() for name, part in self._parts().items()})
            self.step.close()
            added = self.objects.added
            self._start()
            for addition in added:
                self.objects.apply(addition)
            self._accelerate()
            for name, state in self.step.load(path).items():
                self._parts()[name].load_state_dict(state)
        elif event == "averaged_eval":
            with self.step.averaged():
                self.objects.apply("eval")
        else:
            self.objects.apply(event)


def ran(step, scope):
    if scope == "step":
        return "step" if getattr(step, "batches", 0) else "step, never used"
    return scope or "eager"


def averages(average):
    return [(f"average {name}", value.detach().clone()) for name, value in tensors(average.module).items()]


class _StopError(Exception):
    pass


class Events(Hook):
    """Run the events of a program, record the losses, and end the run at the next `save_load`."""

    priority = "LOWEST"

    def __init__(self, program, objects, stop, rank):
        self.program, self.objects, self.stop, self.rank = program, objects, stop, rank
        self.losses = []

    def before_train(self, runner):
        if self.program.loss != "gan":  # otherwise, the optimizers are those of `objects`
            self.objects.optimizer = runner.optim_wrapper.optimizer
            self.objects.optimizers = [self.objects.optimizer]

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 0:
            programs.seed_all(self.program.seed % 1000 + 1 + self.rank)
        for number, event in self.program.events:
            if number == runner.iter and event != "save_load":
                self.objects.apply(event)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append((f"loss[{runner.iter}]", outputs["loss"].clone()))
        if runner.iter + 1 == self.stop:
            raise _StopError


class Scores(BaseMetric):
    """Record the predictions of a validation."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def process(self, data_batch, data_samples):
        self.outputs.append(scores_of(data_samples[0]).detach().clone())
        self.results.append(0)

    def compute_metrics(self, results):
        return {"count": len(results)}


def _first(items):
    """Return a copy of the only item, because forward may change it in place."""
    return copy.deepcopy(items[0])


class OwnStep(programs.Net, BaseModel):
    """The network as a model for MMEngine's Runner that trains itself; `how` says in which way."""

    def forward(self, x, y=None, mode="tensor"):
        outputs = super().forward(x, y)
        if mode == "loss":
            return {"loss": F.mse_loss(scores_of(outputs), y)}
        return [outputs] if mode == "predict" else outputs

    def train_step(self, data, optim_wrapper):
        if self.how == "super":
            return super().train_step(data, optim_wrapper)
        batch = self.data_preprocessor(data, True)
        optims, critic = [optim_wrapper] * (1 + (self.how == "twice")), getattr(self, "critic", None)
        if critic is not None:
            optims = [optim_wrapper["critic"], optim_wrapper["generator"]]
        if self.how == "alternate" and MessageHub.get_current_instance().get_info("iter") % 2 == 0:
            optims.pop()
        for turn, optim in enumerate(optims):
            with optim.optim_context(self):
                loss = programs.turn_loss(self, critic, batch, turn)
            if self.how == "pieces":
                optim.backward(optim.scale_loss(loss))
                if optim.should_update():
                    optim.step()
                    optim.zero_grad()
            else:
                optim.update_params(loss)
        return {"loss": loss}


class InRunner:
    """A run of a program with a Runner, which resumes from a checkpoint at each `save_load`."""

    def __init__(self, program, folder, rank=0):
        self.program, self.folder, self.rank = program, folder, rank
        self.record, self.ran, self.outputs = [], "eager", []

    def run(self):
        stops = dict.fromkeys(number for number, event in self.program.events if event == "save_load")
        for first, stop in zip([0, *stops], [*stops, None], strict=True):
            runner, objects = self._train(first, stop)
        objects.outputs = self.outputs
        self.record += finish(objects)
        average = next((hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)), None)
        if average is not None and average.steps:
            self.record += averages(average)
        self.ran = ran(runner.step, compiled_scope(runner.step, runner.model))
        return self.record

    def _train(self, first, stop):
        objects = Objects(self.program, self.rank, net=OwnStep if self.program.train_step else programs.Net)
        objects.model.how = self.program.train_step
        hook = Events(self.program, objects, stop, self.rank)
        runner = Runner(**self._config(objects, hook, stop), resume=first > 0)
        with contextlib.suppress(_StopError):
            runner.train()
        self.record += hook.losses
        return runner, objects

    def _config(self, objects, hook, stop):
        program = self.program
        ranks = range(program.processes)
        kind, settings = programs.OPTIMIZERS[program.optimizer]
        length = program.epoch or program.batches
        batches = [
            programs.in_form(program, make_batch(program, i, rank)) for i in range(length) for rank in ranks
        ]
        checkpoint = dict(type="CheckpointHook", interval=stop, by_epoch=False, save_last=False)
        cfg = dict(by_epoch=False, max_iters=program.batches, val_interval=4)
        if program.epoch:
            cfg = dict(by_epoch=True, max_epochs=program.batches // program.epoch)
        options = dict(program.options)
        optim = dict(optimizer=dict(type=kind, **settings))
        if program.schedule or program.train_step:
            optim = dict(optimizer=objects.optimizer)
        if program.loss == "gan":
            names = dict(accumulate="accumulative_counts", clip_grad="clip_grad")
            own = {name: options.pop(option) for option, name in names.items() if option in options}
            precision = options.pop("precision", None)
            kind = AmpOptimWrapper if precision else OptimWrapper
            own |= dict(dtype=precision) if precision else {}
            parts = zip(("generator", "critic"), objects.optimizers, strict=True)
            optim = {name: kind(optimizer=optimizer, **own) for name, optimizer in parts}
        loss_fn = "model" if program.loss == "model" else programs.loss_function(program, objects)
        schedule = objects.schedule and dict(scheduler=objects.schedule, by_epoch=False)
        return dict(
            model=objects.model,
            work_dir=str(self.folder),
            train_dataloader=_loader(batches),
            train_cfg=cfg,
            val_dataloader=_loader([programs.in_form(program, make_batch(program, 1000)) for _ in ranks]),
            val_cfg={},
            val_evaluator=Scores(self.outputs),
            optim_wrapper=optim,
            param_scheduler=dict(generator=schedule) if program.loss == "gan" else schedule,
            default_hooks=dict(checkpoint=None if stop is None else checkpoint),
            custom_hooks=[hook],
            loss_fn=None if program.train_step else loss_fn,
            log_level="ERROR",
            randomness=dict(seed=0),
            speed={**options, **_compile(program)},
            launcher="pytorch" if program.processes > 1 else "none",
        )


def _loader(batches):
    return dict(
        dataset=batches, batch_size=1, sampler=dict(type="DefaultSampler", shuffle=False), collate_fn=_first
    )


# ---- judgement --------------------------------------------------------------------------------------------


def judge(program, seconds=150):
    """Run a program with Slipstream and in a plain loop, and return the verdict."""
    torch._dynamo.reset()
    signal.signal(signal.SIGALRM, _time_out)
    signal.alarm(seconds)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _in_two(program, folder) if program.processes > 1 else _judge(program, Path(folder), 0)
    except TimeoutError:
        return Result("hang", traceback.format_exc(limit=-4))
    finally:
        signal.alarm(0)


def _time_out(*_):
    raise TimeoutError


def _judge(program, folder, rank):
    try:
        right, exact = Loop(program, rank).run(), None
        if program.dtype == "float32":
            exact = Loop(program, rank, "float64").run()
    except TimeoutError:
        raise
    except Exception as error:
        return Result("invalid", f"{type(error).__name__}: {error}")
    run = (Own if program.through == "accelerate" else InRunner)(program, folder, rank)
    try:
        found = run.run()
    except SlipstreamError as error:  # a file that was just saved must not be refused
        verdict = "wrong" if isinstance(error, CheckpointError) else "refused"
        return Result(verdict, f"{type(error).__name__}: {error}")
    except TimeoutError:
        raise
    except Exception as error:
        return Result("foreign", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    differences = compare(program, found, right, exact)
    return Result("wrong" if differences else "ok", "; ".join(differences[:4]), run.ran)


def compare(program, found, right, exact):
    """Return the names of the values that differ, and by how much."""
    found, differences = dict(found), []
    relative = EAGER if program.scope is None else COMPILED
    exactly = dict(exact or right)
    for name, value in right:
        if name not in found:
            if not (name.startswith("state") and float(torch.as_tensor(value).abs().max()) == 0):
                differences.append(f"{name} is missing")
            continue
        got, value, best = (
            torch.as_tensor(v, dtype=torch.float64).detach()
            for v in (found[name], value, exactly.get(name, value))  # other batches may overflow in float64
        )
        if got.shape != value.shape:
            differences.append(f"{name} has the shape {tuple(got.shape)}, not {tuple(value.shape)}")
            continue
        size = float(value.abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
        limit = relative * (size + 1e-2)
        if exact is not None:
            own = float((value - best).abs().nan_to_num(0).max())
            limit = 4 * own + HALF[program.options["precision"]] * (size + 1e-2)
        equal = torch.isclose(got, value, rtol=0, atol=limit, equal_nan=True)
        if not bool(equal.all()):
            differences.append(f"{name} differs by {float((got - value).abs().max()):.1e} of {size:.1e}")
    return differences


def _in_two(program, folder):
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "generated.run"])
    results, port = context.SimpleQueue(), free_port()
    children = [
        context.Process(target=_child, args=(program, Path(folder), rank, port, results), daemon=True)
        for rank in range(2)
    ]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        found = []
        while not results.empty():
            found.append(results.get())
        if len(found) < 2:
            return Result("hang", "; ".join(map(str, found)))
        order = ["foreign", "wrong", "refused", "invalid", "ok"]
        return min(found, key=lambda result: order.index(result.verdict))
    finally:
        for child in children:
            child.kill()


def _child(program, folder, rank, port, results):
    torch.set_num_threads(1)
    quiet()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    result = _judge(program, folder, rank)
    results.put(result)
    os._exit(0)  # the other process may be waiting in a collective


def quiet():
    """Turn the log off, and use one thread."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def reduce(program, result, most=60):
    """Return the smallest program found that gets the same verdict, by leaving out parts one at a time."""
    seen = {str(program)}
    while most > 0:
        for candidate in smaller(program):
            if str(candidate) in seen:
                continue
            seen.add(str(candidate))
            most -= 1
            if most < 0:
                break
            if (other := judge(candidate)).verdict == result.verdict:
                program, result = candidate, other
                break
        else:
            break
    return program, result


def check(number, inductor=True, small=False, most=60):
    """Run the program of a seed; return it and its result. A failing program is reduced in at most `most` runs."""
    program = generate(number, inductor, small)
    result = judge(program)
    return (program, result) if result.verdict in PASSED else reduce(program, result, most)
