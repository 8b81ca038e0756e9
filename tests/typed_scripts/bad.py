"""A user's script with one type error on each marked line."""

import torch
from torch import Tensor, nn

from slipstream import Runner, accelerate, feed
from slipstream.config_types import SpeedCfg
from slipstream.model import BaseModel

model = BaseModel()
sgd = torch.optim.SGD(model.parameters())

Runner("ResNet", "work_dir")  # error
Runner(nn.Linear(2, 2), "work_dir", loss_fn="modle")  # error
Runner(model, "work_dir", train_cgf=None)  # error

Runner(model, "work_dir", speed="aut")  # error
Runner(model, "work_dir", speed=dict(compil=True))  # error
Runner(model, "work_dir", speed={"compile": True, "emma": True})  # error
Runner(model, "work_dir", speed=dict(precision="fp17"))  # error
Runner(model, "work_dir", speed=dict(accumulate="2"))  # error
Runner(model, "work_dir", speed=dict(compile="stepp"))  # error
Runner(model, "work_dir", speed=dict(compile=dict(scop="step")))  # error
Runner(model, "work_dir", speed=dict(parallel=dict(type="fsdp2", wraps=["Block"])))  # error
Runner(model, "work_dir", speed=dict(parallel=dict(wrap=["Block"])))  # error
Runner(model, "work_dir", speed=SpeedCfg(compil=True))  # error
accelerate(model, sgd, nn.functional.cross_entropy, speed=dict(compil=True))  # error
speed: SpeedCfg = {"compil": True}  # error

Runner(model, "work_dir", train_cfg=dict(by_epochs=True))  # error
Runner(model, "work_dir", train_cfg=dict(by_epoch=True))  # error
Runner(model, "work_dir", train_cfg=dict(by_epoch=True, max_iters=3))  # error
Runner(model, "work_dir", train_cfg=dict(by_epoch=False, max_iters="3"))  # error
Runner(model, "work_dir", val_cfg=dict(fp61=True))  # error
Runner(model, "work_dir", optim_wrapper=dict(optimiser=sgd))  # error
Runner(model, "work_dir", optim_wrapper=dict(optimizer=sgd, clip_grad=dict(norm=1)))  # error
Runner(model, "work_dir", train_dataloader=dict(dataset=[], batchsize=4))  # error
Runner(model, "work_dir", train_dataloader=dict(batch_size=4))  # error
Runner(model, "work_dir", default_hooks=dict(chekpoint=dict(type="CheckpointHook")))  # error
Runner(model, "work_dir", default_hooks=dict(checkpoint=dict(type="CheckpointHook", intervall=1)))  # error
Runner(model, "work_dir", custom_hooks=["EMAHook"])  # error
Runner(model, "work_dir", randomness=dict(sede=1))  # error
Runner(model, "work_dir", env_cfg=dict(cudnn_benchmarks=True))  # error
Runner(model, "work_dir", auto_scale_lr=dict(enabled=True))  # error

batches: list[tuple[Tensor, int]] = []
for _, target in feed(batches):
    target.backward()  # error
