"""Change the contents of a checkpoint at random, and resume from the checkpoint.

A resumed run must either fail with an error that names the changed key, before its weights or optimizer state change,
or continue with exactly the state in the file. To run many inputs, use
`python tests/faults/fuzz_checkpoint.py --count 5000 --seed 0`.
"""

import argparse
import copy
import math
import random
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.mutations import summary
from slipstream.errors import CheckpointError, ConfigError
from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import Net, training, validation

VALUES = (
    None, True, False, 0, 1, -7, 2**40, 2**70, 0.5, -0.5, 1e30, math.inf, -math.inf, math.nan, "", "x", "9" * 5000,
    b"x", [], {}, [1], [None], {"a": 1}, {1: 2}, [[]], (1, 2, 3), torch.tensor(3), torch.tensor(-1.5), torch.zeros(0),
    torch.zeros(2, 3), torch.ones(4, dtype=torch.bool), torch.tensor(math.nan),
)  # fmt: skip


class DoneError(Exception):
    pass


class Watch(Hook):
    """A hook that copies the state of a run before and after it resumes, and stops after two steps."""

    priority = "LOWEST"

    def __init__(self):
        self.before = self.after = None
        self.steps = 0

    def before_run(self, runner):
        self.before = state_of(runner)

    def before_train(self, runner):
        self.after = state_of(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps += 1
        if self.steps == 2:
            raise DoneError


def state_of(runner):
    """Return a copy of the state that resuming changes, in the format of a checkpoint."""
    average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model
    optim = runner.optim_wrapper
    gradients = {name: p.grad for name, p in runner.model.named_parameters() if p.grad is not None}
    state = {
        "weights": runner.model.state_dict(),
        "average": {"steps": average.steps, **average.module.state_dict()},
        "optimizer": optim.state_dict(),
        "param_schedulers": [scheduler.state_dict() for scheduler in runner.param_schedulers],
        "message_hub": runner.message_hub.state_dict(),
        "gradients": gradients,
        "meta": {"epoch": runner.epoch, "iter": runner.iter, "seed": runner.seed},
        "random_state": runner.checkpoints.random_state,
    }
    return copy.deepcopy(state)


def arguments(folder, *hooks, **changes):
    """Return the arguments of a run with EMA, a loss scaler, schedulers, gradient accumulation and saved scores."""
    options = dict(
        model=dict(type=Net, dropout=0.1, norm=True),
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            dtype="float16",
            optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.01),
            accumulative_counts=2,
            paramwise_cfg=dict(bias_decay_mult=0.0),
        ),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=4),
            dict(type="CosineAnnealingLR", by_epoch=False, begin=4, end=20),
            dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater"),
        ],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=7, by_epoch=False, save_best="acc")
        ),
        custom_hooks=[
            dict(type="EMAHook", momentum=0.1),
            dict(type="EarlyStoppingHook", monitor="acc", patience=9),
            *hooks,
        ],
        train_cfg=dict(by_epoch=True, max_epochs=3),
        **validation(),
    )
    return training(folder, **{**options, **changes})


class Stop(Hook):
    priority = "LOWEST"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 7:
            raise DoneError


def valid_checkpoint(folder):
    """Return the contents of a checkpoint that was saved inside an epoch and an accumulation window."""
    with suppress(DoneError):
        Runner(**arguments(folder, Stop())).train()
    return torch.load(folder / "iter_7.pth", weights_only=True)


# ---- changes --------------------------------------------------------------------------------------------


def children(node):
    if isinstance(node, Mapping):
        return list(node)
    return list(range(min(len(node), 6))) if isinstance(node, list | tuple) else []


def mutated(content, rng):
    """Return a copy of `content` with one change, the path of the change, and a description of the change."""
    content = copy.deepcopy(content)
    path, parent = [], content
    while True:
        key = rng.choice(children(parent))
        path.append(key)
        if not children(parent[key]) or rng.random() < 0.2:
            break
        if isinstance(parent[key], tuple):
            parent[key] = list(parent[key])
        parent = parent[key]
    change = rng.choice((delete, replace, replace, replace, rename, swap, alter, alter, alter))
    text = change(parent, path[-1], rng)
    return content, [*path, text] if change is swap else path, f"{change.__name__} {text}"


def delete(parent, key, rng):
    del parent[key]
    return ""


def replace(parent, key, rng):
    parent[key] = copy.deepcopy(rng.choice(VALUES))
    return repr(parent[key])[:60]


def rename(parent, key, rng):
    name = rng.choice(("x", "", "X" * 300, 7, None, 10**30))
    if isinstance(parent, Mapping):
        parent[name] = parent.pop(key)
    else:
        parent.append(copy.deepcopy(parent[key]))
    return repr(name)[:20]


def swap(parent, key, rng):
    other = rng.choice(children(parent))
    parent[key], parent[other] = parent[other], parent[key]
    return other


def alter(parent, key, rng):
    value = parent[key]
    if isinstance(value, torch.Tensor):
        changes = (
            lambda t: t.double(), lambda t: t.half(), lambda t: t.long(), lambda t: t.bool(),
            lambda t: t.to(torch.complex64), lambda t: t[None], lambda t: t.flatten()[:-1], lambda t: t.new_ones(8, 4),
            lambda t: torch.full_like(t, -1), lambda t: t.float().fill_(math.nan), lambda t: t.new_empty(0),
            lambda t: t.expand(3, *t.shape).clone(), lambda t: t.to_sparse(), lambda t: t.to("meta"),
        )  # fmt: skip
    elif isinstance(value, bool):
        changes = (int, str, lambda v: not v)
    elif isinstance(value, int | float):
        changes = (
            lambda v: -v, lambda v: v + 1, lambda v: float(v) + 0.5, str, lambda v: [v], lambda v: v * 10**20,
            lambda v: math.nan, lambda v: torch.tensor(v), bool, lambda v: -1,
        )  # fmt: skip
    elif isinstance(value, Mapping):
        changes = (
            dict,
            lambda v: list(v.items()),
            lambda v: list(v),
            lambda v: {**v, 3: 3},
            lambda v: {"a": v},
        )
    elif isinstance(value, list | tuple):
        changes = (
            lambda v: list(v)[:-1],
            lambda v: [*v, *v],
            lambda v: dict(enumerate(v)),
            lambda v: [v],
            str,
        )
    else:
        changes = (lambda v: [v], lambda v: {"a": v}, lambda v: f"{v}x")
    chosen = rng.randrange(len(changes))
    parent[key] = changes[chosen](value)
    return chosen


# ---- checks -----------------------------------------------------------------------------------------------


def _dense(tensor):
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same(one, other):
    """Return whether two states are equal. Tensors are converted to the dtype of `one` before the comparison."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        one, other = (_dense(torch.as_tensor(value)) for value in (one, other))
        return one.numel() == other.numel() and bool(
            torch.equal(one.reshape(-1).nan_to_num(7.25), other.to(one.dtype).reshape(-1).nan_to_num(7.25))
        )
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(key in other and same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def expected(content, start):
    """Return the state that a run resumed from `content` must have. `start` is the state before the resume."""
    meta, hub = content["meta"], content.get("message_hub") or {}
    weights, average = content["state_dict"], {}
    if "ema_state_dict" in content:
        prefix, saved = "module.", content["ema_state_dict"]
        average = {**weights, "steps": saved["steps"]}
        average = {key: value for key, value in average.items() if key in start["average"]}
        weights = {k.removeprefix(prefix): v for k, v in saved.items() if str(k).startswith(prefix)}
        if average.get("steps") == 0:  # averaging has not started, so it will start with the weights
            average = {**weights, "steps": 0}
    ranks = content.get("rank_gradients") or ()
    # These keys are not restored: each run selects its own kernels, and AdamW sets decoupled_weight_decay.
    kernels = ("fused", "foreach", "capturable", "decoupled_weight_decay")
    # A different batch size changes the number of iterations.
    position = ("epoch", "iter", "seed") if meta.get("samples_per_step", 8) == 8 else ("epoch", "seed")
    optimizer = {
        "state": content["optimizer"]["state"],
        "param_groups": [
            {key: value for key, value in group.items() if key not in kernels and key in own}
            for group, own in zip(
                content["optimizer"]["param_groups"], start["optimizer"]["param_groups"], strict=True
            )
        ],
    }
    if content["optimizer"].get("loss_scaler"):
        scaler = content["optimizer"]["loss_scaler"]
        optimizer["loss_scaler"] = {
            key: scaler[key] for key in start["optimizer"]["loss_scaler"] if key in scaler
        }
    schedulers = [
        {key: state[key] for key in own}
        for own, state in zip(start["param_schedulers"], content["param_schedulers"], strict=True)
    ]
    own = ("epoch", "iter", "eta", "max_epochs", "max_iters", "loop_stage")  # each run sets these values
    infos = {k: v for k, v in hub.get("runtime_info", {}).items() if k not in own}
    return {
        "weights": weights,
        "average": average,
        "optimizer": optimizer,
        "param_schedulers": schedulers,
        "gradients": {**(ranks[0] if len(ranks) == 1 else {}), **content.get("gradients", {})},
        "message_hub": {"log_scalars": hub.get("log_scalars", {}), "runtime_info": infos},
        "meta": {key: meta[key] for key in position if meta.get(key) is not None},
        **({"random_state": meta["random_state"][0]} if len(meta.get("random_state") or ()) == 1 else {}),
    }


def outcome_of(content, path, folder):
    """Resume from `content`, whose entry at `path` was changed.

    Return what is wrong with the result (or None), and the error message (or None).
    """
    file = folder / "changed.pth"
    torch.save(content, file)
    watch, runner = Watch(), None
    try:
        runner = Runner(**arguments(folder / "run", watch, resume=str(file), log_level="CRITICAL"))
        runner.train()
    except DoneError:
        pass
    except (CheckpointError, ConfigError) as error:
        return _wrong_error(error, path, runner, watch), str(error)
    except FloatingPointError as error:  # NonFiniteLossError after a resume from NaN
        if watch.after is None:
            return f"{type(error).__name__}: {error}", str(error)
    except Exception as error:
        return traceback.format_exc(), str(error)
    wanted = expected(content, watch.before)
    different = [key for key, value in wanted.items() if not same(value, watch.after[key])]
    return (f"accepted, but {different} differ from the file" if different else None), None


def _wrong_error(error, path, runner, watch):
    message = str(error)
    if "partly restored" in message or (watch.after is not None):
        return f"found too late: {message}"
    names = [part.removeprefix("module.") for part in path if isinstance(part, str)]
    if not any(name and name in message for name in names):
        return f"the message does not name the key: {message}"
    if runner is not None and watch.before is not None and not same(watch.before, state_of(runner)):
        return f"the run was changed: {message}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = valid_checkpoint(folder)
        found = 0
        for number in range(options.seed, options.seed + options.count):
            changed, path, change = mutated(content, random.Random(number))
            problem, _ = outcome_of(changed, path, folder)
            if problem is not None:
                found += 1
                print(f"--- seed {number}: {path} {change}\n{problem.strip()}", flush=True)
    print(summary("fuzz_checkpoint", options.count, found))
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
