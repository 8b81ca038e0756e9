"""The plain loop that a program must agree with: what each option means, written without Slipstream.

Options that only change the speed (`compile`, `fused`, `channels_last`, `activation_checkpointing`, ...) do nothing
here. With several processes, each one runs this loop, and gradients are averaged with plain all-reduces.
"""

import copy
import functools
import math
import random
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from generated import programs
from generated.programs import Objects, make_batch, out_of_form

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def windows(program):
    """Return, for each batch, the number of batches in its accumulation window, and whether it ends the window."""
    size, total = program.options.get("accumulate", 1), program.batches
    if has_own_windows(program):
        total += size  # the last window may be incomplete
    epoch = program.epoch if program.through == "accelerate" else 0
    found = []
    while len(found) < total:
        first = len(found)
        end = first + size
        if epoch:
            end = min(end, (first // epoch + 1) * epoch)
        if program.known_length or program.through == "runner":
            end = min(end, total)
        found += [(end - first, batch + 1 == end) for batch in range(first, end)]
    return found[: program.batches]


def has_own_windows(program):
    """Return whether each optimizer of a Runner has its own accumulation windows, of which the run knows nothing."""
    return program.through == "runner" and program.loss == "gan"


class Average:
    """The weight average of `ema`."""

    def __init__(self, program, model):
        options = program.options["ema"]
        self.kind, self.decay, self.beta = options["type"], options.get("decay"), options.get("beta")
        self.interval, self.by_batch = options.get("interval", 1), options.get("count") == "batches"
        self.first = max(options.get("begin_iter", 0), 1)
        self.always = has_own_windows(program)
        ends = [
            number
            for number, (_, end) in enumerate(windows(program), 1)
            if (end or self.always) and number >= self.first
        ]
        self.total = program.batches - self.first + 1 if self.by_batch else max(len(ends), 1)
        self.updates = 0
        saved = model.state_dict()
        self.values = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, buffer in model.named_buffers():
            if (
                name in saved
                and buffer.is_floating_point()
                and buffer.isfinite().all()
                and not _is_power(name)
            ):
                self.values[name] = buffer.clone()

    def take(self, model, batch, ends):
        """Include the weights after batch number `batch` (counted from 1)."""
        if not (ends or self.always) or batch < self.first:
            return
        self.updates += 1
        if (self.updates - 1) % self.interval:
            return
        step = batch - self.first + 1 if self.by_batch else self.updates
        decay = self._decay(step)
        for name, tensor in tensors(model).items():
            if name in self.values:
                new = tensor.detach().clone()
                self.values[name] = (
                    new if self.updates == 1 else decay * self.values[name] + (1 - decay) * new
                )

    def _decay(self, step):
        if self.kind == "swa":
            taken = (self.updates - 1) // self.interval
            return taken / (taken + 1)
        if self.kind == "threshold":
            return min(self.decay, (1 + step) / (10 + step))
        if self.kind == "exp":
            return self.decay * (1 - math.exp(-self.beta * step / self.total))
        return self.decay

    def swap(self, model):
        if not self.updates:
            return
        current = tensors(model)
        with torch.no_grad():
            before = {name: current[name].detach().clone() for name in self.values}
            for name, value in self.values.items():
                if not _is_expanded(current[name]):
                    current[name].copy_(value)
            self.values = before


def _is_power(name):
    """Return whether a buffer is a vector of spectral norm's power iteration, which is copied and not averaged."""
    return name.endswith(("weight_u", "weight_v", "0._u", "0._v"))


def _is_expanded(tensor):
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def sync_norm(norm, x):
    """BatchNorm over the batches of all processes."""
    if not norm.training:
        return type(norm).forward(norm, x)
    shape = (1, -1, *[1] * (x.ndim - 2))
    flat = x.transpose(0, 1).flatten(1)
    sums = all_reduce(torch.cat([flat.sum(1), flat.new_tensor([float(flat.shape[1])])]))
    mean, count = sums[:-1] / sums[-1], sums[-1].detach()
    var = all_reduce((flat - mean[:, None]).square().sum(1)) / count
    with torch.no_grad():
        norm.num_batches_tracked += 1
        weight = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.detach(), weight)
        norm.running_var.lerp_(var.detach() * count / (count - 1), weight)
    y = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + norm.eps)
    return y * norm.weight.view(shape) + norm.bias.view(shape)


class Loop:
    """One run of a program in a plain loop; `record` has the names and values to compare."""

    def __init__(self, program, rank=0, dtype=None):
        self.program, self.rank, self.dtype = program, rank, dtype
        self.world = program.processes
        self.options = {k: (v if v is not True else {}) for k, v in program.options.items()}
        self.record = []
        self.objects = self._new()
        self.average = Average(program, self.objects.model) if "ema" in self.options else None
        self.scales = [65536.0 if program.options.get("precision") == "fp16" else 1.0] * 2
        self.buffers, self.bad, self.turn = None, False, 0

    def _new(self):
        objects = Objects(self.program, self.rank, self.dtype)
        if self.world > 1 and self.program.options.get("sync_bn"):
            for module in objects.model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.forward = functools.partial(sync_norm, module)
        return objects

    def run(self):
        program = self.program
        for batch, (size, ends) in enumerate(windows(program)):
            self.events(batch)
            for self.turn in range(2 if program.loss == "gan" or program.train_step == "twice" else 1):
                if program.train_step != "alternate" or self.turn == 0:
                    losses = self.train(batch, size, ends)
                elif batch % 2:
                    losses = self.train(batch, *windows(program)[batch // 2])
            self.record.append((f"loss[{batch}]", losses))
            if program.through == "accelerate":
                self.record.append((f"updated[{batch}]", ends))
            if self.average is not None:
                self.average.take(self.objects.model, batch + 1, ends)
            self.objects.after_batch()
            if program.through == "runner" and (batch + 1, "save_load") in program.events:
                self.save_and_load()  # a resumed run repeats the validation after the checkpoint
            if validates(program, batch + 1):
                self.evaluate()
        self.record += finish(self.objects)
        if self.average is not None and self.average.updates:
            self.record += [(f"average {name}", value) for name, value in self.average.values.items()]
        return self.record

    def events(self, batch):
        for number, event in self.program.events:
            if number != batch:
                continue
            if event == "save_load":
                if self.program.through == "accelerate":
                    self.save_and_load()
            elif event == "averaged_eval":
                self.evaluate()
            else:
                self.objects.apply(event)

    def evaluate(self):
        """Run an evaluation with the averaged weights."""
        model, average = self.objects.model, self.average
        if average is not None:
            average.swap(model)
        self.share_statistics()
        self.objects.apply("eval")
        if average is not None:
            average.swap(model)

    def autocast(self):
        dtype = DTYPES.get(self.program.options.get("precision")) if self.dtype is None else None
        return torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext()

    # ---- one batch ------------------------------------------------------------------------------

    @property
    def number(self):
        """The number of the optimizer whose turn it is."""
        return 1 - self.turn if self.program.loss == "gan" else 0

    @property
    def scale(self):
        return self.scales[self.number]

    def params(self):
        return params_of(self.objects.optimizers[self.number])

    def train(self, batch, size, ends):
        if self.buffers is None:
            self.buffers = {name: buffer.clone() for name, buffer in self.objects.model.named_buffers()}
        if "sam" in self.options:
            loss = self.sharpness_aware(batch, size)
        else:
            loss = self.backward(batch, size)
        self.bad |= not bool(self.everywhere(loss.isfinite()))
        if ends:
            self.update()
        return loss

    def backward(self, batch, size):
        program, objects = self.program, self.objects
        sample = make_batch(program, batch, self.rank, objects.model.stem.weight.dtype)
        with self.autocast():
            loss = self.loss(programs.in_form(program, sample))
        (loss / size * self.scale).backward()
        trained = {param for optimizer in objects.optimizers for param in params_of(optimizer)}
        for param in {*objects.model.parameters()} - trained:
            param.grad = None
        return loss.detach()

    def loss(self, batch):
        program, model = self.program, self.objects.model
        if program.loss == "gan" or program.train_step == "twice":
            return programs.turn_loss(model, self.objects.other, batch, self.turn)
        if program.loss == "model":
            return (model(**batch) if isinstance(batch, dict) else model(*batch))["loss"]
        if (compute := programs.batch_loss(program, self.objects)) is not None:
            loss = compute(model, batch)
            return sum(loss.values()) if isinstance(loss, dict) else loss
        sample = out_of_form(batch)
        found = programs.loss_function(program, self.objects)(model(sample.x), sample.y)
        if program.loss == "dict":
            return found["loss_a"] + found["loss_b"]
        return sum(loss.mean() for loss in found["loss_all"]) if program.loss == "list" else found

    def sharpness_aware(self, batch, size):
        options = dict(rho=0.05, adaptive=False, eta=0.01) | self.options["sam"]
        rho, adaptive, eta = options["rho"], options["adaptive"], options["eta"]
        params, model = self.params(), self.objects.model
        held = [param.grad for param in params]
        for param in params:
            param.grad = None
        loss = self.backward(batch, size)
        self.reduce()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        before = [param.detach().clone() for param in params]
        names = {param: name for name, param in model.named_parameters()}
        with torch.no_grad():
            scales = [
                param.abs() + eta if adaptive and "weight" in names.get(param, "").rpartition(".")[2] else 1.0
                for param in params
            ]
            ascents = [
                None if param.grad is None else param.grad / self.scale * scale
                for param, scale in zip(params, scales, strict=True)
            ]
            norm = sum(ascent.square().sum() for ascent in ascents if ascent is not None) ** 0.5
            for param, ascent, scale in zip(params, ascents, scales, strict=True):
                if ascent is not None:
                    param.add_(ascent * scale * (rho / norm))
                param.grad = None
        self.backward(batch, size)
        self.reduce()
        with torch.no_grad():
            for param, old, sum_ in zip(params, before, held, strict=True):
                param.copy_(old)
                if sum_ is not None:
                    param.grad = sum_ if param.grad is None else sum_ + param.grad
            self.restore(buffers)
        return loss

    def restore(self, buffers):
        with torch.no_grad():
            for name, buffer in self.objects.model.named_buffers():
                if not _is_expanded(buffer):
                    buffer.copy_(buffers[name])

    def reduce(self):
        if self.world > 1:
            for param in self.params():
                self.mean([] if param.grad is None else [param.grad])

    def everywhere(self, flag):
        if self.world > 1:
            flag = flag.to(torch.int64)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag

    # ---- the update -----------------------------------------------------------------------------

    def update(self):
        options, params = self.options, [param for param in self.params() if param.grad is not None]
        if "sam" not in options:
            self.reduce()
        for param in params:
            param.grad = param.grad / self.scale
        finite = all(bool(param.grad.isfinite().all()) for param in params)
        good = finite and not self.bad
        if (options.get("precision") == "fp16" and not finite) or ("nan_guard" in options and not good):
            if "nan_guard" in options:
                self.restore(self.buffers)
        else:
            self.change_gradients(params)
            before = [param.detach().clone() for param in params]
            self.objects.optimizers[self.number].step()
            self.decay_layers(params, before)
        if options.get("precision") == "fp16" and not finite:
            self.scales[self.number] *= 0.5
        self.buffers, self.bad = None, False
        self.objects.optimizers[self.number].zero_grad()

    def change_gradients(self, params):
        options, head = self.options, set(self.objects.model.head.parameters())
        if (centralize := options.get("gradient_centralization")) is not None:
            for param in params:
                if param.ndim >= (3 if centralize.get("conv_only") else 2):
                    rows = param.grad.flatten(1)
                    param.grad = (rows - rows.mean(1, keepdim=True)).view_as(param)
        if (adaptive := options.get("adaptive_clip")) is not None:
            for param in params:
                if not ("exclude" in adaptive and param in head):
                    param.grad = _clip_units(param.grad, param.detach(), adaptive["clip_factor"])
        if (clip := options.get("clip_grad")) is not None:
            self.clip(clip, params)

    def clip(self, clip, params):
        if clip.get("type") == "value":
            for param in params:
                param.grad = param.grad.clamp(-clip["clip_value"], clip["clip_value"])
            return
        kind = clip.get("norm_type", 2.0)
        flat = torch.cat([param.grad.flatten() for param in params])
        norm = flat.abs().max() if kind == math.inf else flat.abs().pow(kind).sum().pow(1 / kind)
        for param in params:
            param.grad = param.grad * min(1.0, float(clip["max_norm"] / (norm + 1e-6)))

    def decay_layers(self, params, before):
        if "layer_decay" not in self.options:
            return
        decay, model = self.options["layer_decay"]["decay"], self.objects.model
        layers = [block for block in model.blocks if any(True for _ in block.parameters())]
        depths = {param: len(layers) + 1 for param in model.stem.parameters()}
        for number, layer in enumerate(layers):
            depths |= {param: len(layers) - number for param in layer.parameters()}
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old + decay ** depths.get(param, 0) * (param - old))

    # ---- saving and loading ---------------------------------------------------------------------

    def share_statistics(self):
        """Average BatchNorm's statistics over the ranks, as a Runner does before validation and checkpoints."""
        if self.world > 1 and self.program.through == "runner":
            for module in self.objects.model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    self.mean([module.running_mean, module.running_var])

    def mean(self, tensors):
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self.world

    def save_and_load(self):
        """Continue with new objects. All processes load the file of the first one."""
        old = self.objects
        self.share_statistics()
        if self.world > 1:
            buffers = dict(old.model.named_buffers())
            if self.average is not None:
                own = [value for name, value in self.average.values.items() if name in buffers]
                self.mean(own if self.program.through == "runner" else [])
                buffers |= {f"average {i}": value for i, value in enumerate(own)}
            for buffer in buffers.values():
                dist.broadcast(buffer, 0)
        state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.objects = new = self._new()
        new.outputs = old.outputs
        for event in old.added:
            new.apply(event)
        new.model.load_state_dict(copy.deepcopy(old.model.state_dict()))
        if self.program.through == "runner":  # a resumed Runner keeps what hooks have frozen
            for param, old_param in zip(new.model.parameters(), old.model.parameters(), strict=True):
                param.requires_grad_(old_param.requires_grad)
            for module, old_module in zip(new.model.modules(), old.model.modules(), strict=True):
                module.training = old_module.training
        for optimizer, before in zip(new.optimizers, old.optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
            for param, old_param in zip(params_of(optimizer), params_of(before), strict=True):
                param.grad = old_param.grad
        for name in ("loss", "schedule", "other"):
            if getattr(old, name) is not None:
                getattr(new, name).load_state_dict(getattr(old, name).state_dict())
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def _clip_units(grad, param, factor):
    grads, weights = (t.flatten(1) if t.ndim > 1 else t.reshape(1, -1) for t in (grad, param))
    limits = factor * weights.norm(dim=1, keepdim=True).clamp(min=1e-3)
    return (grads * (limits / grads.norm(dim=1, keepdim=True)).clamp(max=1.0)).view_as(grad)


def validates(program, batches):
    """Return whether a Runner validates after this number of batches: each epoch or four iterations, and at the end."""
    return program.through == "runner" and (batches % (program.epoch or 4) == 0 or batches == program.batches)


def finish(objects):
    """Return the names and values of the final state."""
    model, groups = objects.model, objects.optimizer.param_groups
    values = {f"output[{i}]": output for i, output in enumerate(objects.outputs)} | tensors(model)
    if objects.loss is not None:
        values |= {f"loss {name}": value for name, value in objects.loss.state_dict().items()}
    if objects.other is not None:
        values |= {f"other {name}": value for name, value in objects.other.state_dict().items()}
    names = {param: name for name, param in model.named_parameters()}
    for param, state in (item for optimizer in objects.optimizers for item in optimizer.state.items()):
        values |= {
            f"state {names.get(param)} {k}": v for k, v in state.items() if k != "step" and v is not None
        }
    for name, module in model.named_modules():
        values |= {
            f"python {name}.{k}": v for k, v in vars(module).items() if k in ("calls", "means", "scale")
        }
    values |= {f"lr {i}": group["lr"] for i, group in enumerate(groups)}
    values |= {"random torch": torch.rand(2), "random numpy": np.random.rand(), "random": random.random()}
    return [
        (name, copy.deepcopy(v.detach() if isinstance(v, torch.Tensor) else v)) for name, v in values.items()
    ]
