"""Small runs in any number of processes, with a model whose parameters cannot be sharded evenly."""

import torch
from torch import nn
from torch.utils.data import Dataset

from slipstream import dist
from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.model import BaseModel, unwrap_model
from slipstream.runner import Runner

SAMPLES, BATCH = 20, 4
SGD = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), clip_grad=dict(max_norm=0.2))
ADAMW = dict(optimizer=dict(type="AdamW", lr=0.01), clip_grad=dict(max_norm=0.5))
ACCUMULATED = dict(SGD, accumulative_counts=2)
FSDP = dict(type="fsdp2", wrap=["Block"])
HSDP = dict(type="hsdp", wrap=["Block"], shard_size=2)


class Samples(Dataset):
    def __init__(self, size=SAMPLES):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(size, n, generator=generator) for n in (3, 1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 5), nn.Tanh())


class Net(BaseModel):
    def __init__(self, norm=False):
        super().__init__(init_cfg=dict(type="NormalInit", layer="Linear", std=0.4))
        self.stem = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 1)

    def forward(self, x, y, mode):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        out = self.head(x)
        return {"loss": (out - y).square().mean()} if mode == "loss" else (out - y).square()


class Error(BaseMetric):
    """A metric that computes the mean error over all samples."""

    def process(self, data_batch, data_samples):
        self.results += data_samples.flatten().tolist()

    def compute_metrics(self, results):
        return {"error": sum(results) / len(results)}


class Record(Hook):
    """Store losses, gradient norms and validation errors."""

    def __init__(self):
        self.losses, self.norms, self.errors = [], [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = outputs["loss"].clone()
        dist.all_reduce(loss, "mean")
        self.losses.append(loss)
        if "grad_norm" in outputs:
            assert type(outputs["grad_norm"]) is torch.Tensor
            self.norms.append(outputs["grad_norm"])

    def after_val_epoch(self, runner, metrics=None):
        self.errors.append(metrics["error"])


def full(tree):
    """Return nested containers with every sharded tensor gathered."""
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [full(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return (tree.full_tensor() if hasattr(tree, "full_tensor") else tree).detach().clone()
    return tree


def make(folder, parallel=None, epochs=4, optim=SGD, ema=False, model=None, **changes):
    """Return a Runner that trains with BATCH samples per step over all processes."""
    world = changes.pop("world", 1)
    loader = dict(dataset=Samples(), batch_size=BATCH // world)
    options = dict(
        train_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=True)),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        val_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=False)),
        val_cfg=dict(),
        val_evaluator=dict(type=Error),
        optim_wrapper=optim,
        param_scheduler=dict(type="MultiStepLR", milestones=[3], by_epoch=True),
        custom_hooks=[Record(), *([dict(type="EMAHook", momentum=0.2)] if ema else [])],
        default_hooks=dict(checkpoint=None),
        launcher="pytorch" if world > 1 else "none",
        randomness=dict(seed=3),
        log_level="ERROR",
        cfg=dict(parallel=parallel),
    )
    return Runner(model or Net(), str(folder), **{**options, **changes})


def train(folder, *args, **kwargs):
    """Train. Return losses, gradient norms, validation errors, weights and optimizer state."""
    runner = make(folder, *args, **kwargs)
    runner.train()
    record = next(hook for hook in runner.hooks if isinstance(hook, Record))
    return {
        "losses": torch.stack(record.losses) if record.losses else None,
        "norms": torch.stack(record.norms) if record.norms else None,
        "errors": record.errors,
        "weights": full(dict(unwrap_model(runner.model).state_dict())),
        "optimizer": full(runner.optim_wrapper.state_dict()["state"]),
        "kind": type(runner.model).__name__,
    }


def assert_same(left, right, rtol=0.0, atol=0.0, steps=None):
    """Compare two runs.

    `left` may contain fewer losses, norms and validation errors than `right`. In this case, they are compared with the
    last values in `right`.
    """
    assert isinstance(left, dict), left
    assert isinstance(right, dict), right
    if steps is not None:
        assert len(left["losses"]) == steps
    for name in ("weights", "optimizer"):
        torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=atol)
    for name in ("losses", "norms", "errors"):
        if left[name] is not None:
            mine = torch.as_tensor(left[name])
            theirs = torch.as_tensor(right[name])[-len(mine) :]
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0)
