"""A user's script without type errors: literals, variables, configuration files and objects."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Config, Runner, accelerate, feed
from slipstream.config_types import CompileCfg, SpeedCfg
from slipstream.hooks import CheckpointHook
from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper

cfg = Config.fromfile("config.py")
options: dict[str, Any] = {"compile": True}
mapping: Mapping[str, Any] = options
speed = SpeedCfg(compile=CompileCfg(scope="model"), ema=True)
flag: bool = cfg.flag
number: int = cfg.number


class Model(BaseModel):
    def forward(self, inputs: Any, targets: Any = None, mode: str = "tensor") -> Any:
        return {"loss": inputs.sum()}


class OwnStep(nn.Module):
    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        return {}


class OwnLoop:
    pass


model = Model()
loader = DataLoader(TensorDataset(torch.zeros(8, 2)))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)

Runner(model, "work_dir")
Runner(OwnStep(), "work_dir", speed=None)
Runner(nn.Linear(2, 2), "work_dir", loss_fn=nn.functional.mse_loss, limit_train_batches=2, fast_dev_run=True)
Runner(nn.Linear(2, 2), "work_dir", loss_fn="model", train_dataloader=[(torch.ones(1, 2), torch.ones(1, 2))])
Runner(dict(type="Model", width=3), "work_dir", speed="auto")
Runner(cfg.model, "work_dir", train_cfg=cfg.train_cfg, optim_wrapper=cfg["optim_wrapper"], cfg=cfg)
Runner(cfg, "work_dir", speed=cfg)
Runner(mapping, "work_dir", train_cfg=mapping, val_cfg=options, env_cfg=mapping, default_hooks=options)
Runner(
    model,
    "work_dir",
    train_dataloader=dict(
        dataset=dict(type="Images", root="data"),
        batch_size=4,
        num_workers="auto",
        sampler=dict(type="DefaultSampler"),
    ),
    val_dataloader=loader,
    test_dataloader=dict(dataloader=loader, num_batch_per_epoch=5),
    train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=number, dynamic_intervals=[(2, 1)]),
    val_cfg=dict(),
    test_cfg=dict(type="TestLoop", fp16=flag),
    val_evaluator=dict(type="Accuracy"),
    auto_scale_lr=dict(enable=True, base_batch_size=16),
    optim_wrapper=dict(
        type="AmpOptimWrapper",
        optimizer=dict(type="SGD", lr=0.1),
        dtype="bfloat16",
        clip_grad=dict(max_norm=35),
    ),
    param_scheduler=[dict(type="LinearLR", end=5), dict(type="PolyLR", begin=5)],
    default_hooks=dict(
        checkpoint=dict(type="CheckpointHook", interval=2, save_best=["mIoU"]),
        logger=dict(type="LoggerHook", interval=50, priority="LOW"),
        timer=None,
    ),
    custom_hooks=[dict(type="EMAHook", momentum=0.1), CheckpointHook()],
    env_cfg=dict(cudnn_benchmark=True, mp_cfg=dict(mp_start_method="fork"), dist_cfg=dict(backend="gloo")),
    randomness=dict(seed=number, deterministic=flag),
    speed=dict(
        auto=True,
        precision="bf16",
        compile=dict(scope="block", blocks=["Block"]),
        ema=dict(decay=0.99),
        parallel=dict(type="fsdp2", wrap=["Block"]),
        accumulate=number,
        channels_last=flag,
        nan_guard="skip",
        layer_decay=0.7,
        activation_checkpointing=["Block"],
        clip_grad=dict(type="value", clip_value=1),
    ),
)
Runner(model, "work_dir", train_cfg=dict(by_epoch=False, max_iters=number), optim_wrapper=sgd, speed=speed)
Runner(model, "work_dir", train_cfg=dict(type=OwnLoop, max_iters=3), optim_wrapper=OptimWrapper(sgd))
Runner(model, "work_dir", optim_wrapper=dict(optimizer=sgd, accumulative_counts=2), train_cfg=None)
Runner(model, "work_dir", optim_wrapper=dict(generator=OptimWrapper(sgd), discriminator=OptimWrapper(sgd)))
Runner(model, "work_dir", speed={"parallel": {"type": "ddp", "static_graph": True}, "sam": options})
Runner(model, "work_dir", speed={**speed, "accumulate": 2})
Runner(model, "work_dir", speed=dict(compile=True) if flag else None)

batches: list[tuple[Tensor, int]] = []
step = accelerate(
    nn.Linear(2, 2), sgd, nn.functional.cross_entropy, speed=dict(compile=True), total_steps=number
)
for inputs, target in feed(batches):
    step((inputs.float(), target.bit_count()))
for batch in feed(loader, prefetch=2):
    step(batch)
