"""Test that dicts with the key `_scope_`, as in configurations from a library, use the classes of that library."""

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import nn

from slipstream.config.load import set_scope
from slipstream.registry import Registry

LIBRARY = Registry("model", parent=MODELS, scope="tiny_library")
LIBRARY_DATA = Registry("dataset", parent=DATASETS, scope="tiny_library")


@LIBRARY.register_module()
class Layer(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)


@LIBRARY.register_module()
class Tiny(BaseModel):
    def __init__(self, layer, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.layer = MODELS.build(layer)

    def forward(self, inputs, mode="tensor"):
        values = self.layer(torch.stack(list(inputs)))
        return {"loss": values.square().mean()} if mode == "loss" else [values]


@LIBRARY_DATA.register_module("Ones")
def ones():
    return [{"inputs": torch.ones(2)}] * 4


def config(folder):
    values = set_scope(
        dict(
            model=dict(type="Tiny", layer=dict(type="Layer")),
            train_dataloader=dict(
                batch_size=2,
                dataset=dict(type="Ones"),
                sampler=dict(type="DefaultSampler", shuffle=True),
            ),
            val_dataloader=dict(batch_size=2, dataset=dict(type="Ones")),
            train_cfg=dict(type="EpochBasedTrainLoop", max_epochs=1),
            val_cfg=dict(type="ValLoop"),
            val_evaluator=dict(type="mmengine.DumpResults", out_file_path=str(folder / "results.pkl")),
            optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1)),
            param_scheduler=[dict(type="MultiStepLR", milestones=[1])],
            default_hooks=dict(timer=dict(type="IterTimerHook"), checkpoint=dict(type="CheckpointHook")),
            visualizer=dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")]),
            log_processor=dict(type="LogProcessor", window_size=5),
        ),
        "tiny_library",
    )
    assert values["train_cfg"]["_scope_"] == values["optim_wrapper"]["_scope_"] == "tiny_library"
    return Config({**values, "work_dir": str(folder)})


def test_a_configuration_with_scopes_in_all_dicts_trains_and_validates(tmp_path):
    runner = Runner.from_cfg(config(tmp_path))
    before = runner.model.layer.weight.detach().clone()
    runner.train()
    assert type(runner.model.layer) is Layer
    assert not torch.equal(runner.model.layer.weight, before)
    assert (tmp_path / "results.pkl").is_file()
