"""Train a small network in float64 with `mmengine` (MMEngine or Slipstream). Print losses and sums of weights as JSON.

Arguments: the work_dir, the number of epochs, and the checkpoint to resume from, if any.
"""

import json
import sys

import torch
import torch.nn.functional as F
from mmengine.dataset import BaseDataset
from mmengine.hooks import Hook
from mmengine.model import BaseModel, BaseModule, ImgDataPreprocessor
from mmengine.registry import DATASETS, HOOKS, MODELS
from mmengine.runner import Runner
from mmengine.structures import LabelData
from torch import nn

losses = []


@DATASETS.register_module()
class Squares(BaseDataset):
    def load_data_list(self):
        return [{"value": i, "label": i % 3} for i in range(18)]

    def prepare_data(self, idx):
        info = self.get_data_info(idx)
        generator = torch.Generator().manual_seed(info["value"])
        image = torch.randint(0, 255, (3, 8, 8), generator=generator, dtype=torch.uint8)
        sample = LabelData(metainfo={"sample_idx": info["sample_idx"]}, label=torch.tensor(info["label"]))
        return {"inputs": image, "data_samples": sample}


@MODELS.register_module()
class Backbone(BaseModule):
    def __init__(self):
        super().__init__(init_cfg=dict(type="Kaiming", layer="Conv2d"))
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))).flatten(1)


@MODELS.register_module()
class Tiny(BaseModel):
    def __init__(self, backbone, data_preprocessor=None):
        super().__init__(data_preprocessor, init_cfg=dict(type="Normal", layer="Linear", std=0.05))
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(144, 3)

    def forward(self, inputs, data_samples=None, mode="tensor"):
        logits = self.head(self.backbone(inputs.double()))
        if mode != "loss":
            return logits
        target = torch.stack([sample.label for sample in data_samples])
        return {"loss_cls": F.cross_entropy(logits, target, reduction="none"), "size": logits.square().mean()}


@HOOKS.register_module()
class Record(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        losses.append(float(outputs["loss"]))


torch.set_default_dtype(torch.float64)
runner = Runner(
    model=dict(type="Tiny", backbone=dict(type="Backbone")),
    data_preprocessor=ImgDataPreprocessor(mean=[120.0], std=[60.0], pad_size_divisor=4),
    work_dir=sys.argv[1],
    train_dataloader=dict(
        batch_size=4,
        dataset=dict(type="Squares"),
        sampler=dict(type="DefaultSampler", shuffle=True),
        num_workers=0,
    ),
    train_cfg=dict(by_epoch=True, max_epochs=int(sys.argv[2])),
    optim_wrapper=dict(
        optimizer=dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=0.01),
        paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=0.5)}),
        clip_grad=dict(max_norm=1.0),
        accumulative_counts=2,
    ),
    param_scheduler=[
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=5),
        dict(type="MultiStepLR", milestones=[2], by_epoch=True),
    ],
    custom_hooks=[dict(type="Record")],
    default_scope="mmengine",
    randomness=dict(seed=3),
    load_from=sys.argv[3] if len(sys.argv) > 3 else None,
    resume=len(sys.argv) > 3,
)
runner.train()
weights = {name: value.double().sum().item() for name, value in runner.model.state_dict().items()}
print("RESULT " + json.dumps({"losses": losses, "weights": weights}))
