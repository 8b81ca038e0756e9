"""Test that `DumpResults`, test-time augmentation, model wrappers, hubs and `load_or_resume` behave as in MMEngine."""

import numpy as np
import pytest
import torch
from mmengine import fileio
from mmengine.config import Config
from mmengine.evaluator import DumpResults, Evaluator
from mmengine.hooks import Hook
from mmengine.hooks.test_time_aug_hook import build_runner_with_tta
from mmengine.logging import MessageHub
from mmengine.model import BaseModel, BaseTTAModel, is_model_wrapper
from mmengine.registry import DATASETS, METRICS, MODEL_WRAPPERS, MODELS
from mmengine.runner import Runner
from mmengine.structures import InstanceData, LabelData
from torch import nn

from slipstream.errors import ConfigError
from slipstream.model import unwrap_model
from slipstream.registry import Registry


def test_results_are_written_as_a_pickle_file_that_load_reads(tmp_path):
    path = tmp_path / "sub/results.pkl"
    path.parent.mkdir()
    metric = METRICS.build(dict(type="DumpResults", out_file_path=str(path)))
    assert type(metric) is DumpResults
    evaluator = Evaluator(metric)
    image = LabelData(metainfo={"id": 3}, label=torch.tensor([1, 2]), nested=InstanceData(x=torch.ones(2)))
    evaluator.process(data_samples=[image, {"score": np.float32(0.5), "half": torch.ones(2).half()}])
    assert evaluator.evaluate(2) == {}
    first, second = fileio.load(str(path))
    assert first["label"].tolist() == [1, 2]
    assert first["nested"]["x"].tolist() == [1, 1]
    assert second["score"] == 0.5
    assert second["half"].dtype == torch.float16
    with pytest.raises(ConfigError, match=r"must end with \.pkl or \.pickle"):
        DumpResults("results.pth")


def test_a_wrapper_that_a_library_registers_is_found():
    wrappers = Registry("model wrapper", parent=MODEL_WRAPPERS, scope="library_with_wrapper")

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    inner = nn.Linear(1, 1)
    assert not is_model_wrapper(Wrapper(inner))
    assert unwrap_model(wrapper := Wrapper(inner)) is wrapper
    wrappers.register_module(module=Wrapper)
    assert is_model_wrapper(Wrapper(inner))
    assert is_model_wrapper(type("Derived", (Wrapper,), {})(inner))
    assert not is_model_wrapper(Wrapper(inner), Registry("other", scope="other"))
    assert unwrap_model(Wrapper(inner)) is inner


@DATASETS.register_module()
class Values:
    def __init__(self, pipeline=None):
        self.pipeline = pipeline or [1.0]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        versions = [torch.full((2,), index + float(k)) for k in self.pipeline]
        return {"inputs": versions if len(versions) > 1 else versions[0]}


@MODELS.register_module()
class Double(BaseModel):
    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.weight = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, inputs, mode="tensor"):
        values = [self.weight * item for item in inputs]
        return {"loss": torch.stack(values).mean()} if mode == "loss" else values


@MODELS.register_module()
class Largest(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [torch.stack(list(versions)).amax(0) for versions in data_samples_list]


def config(folder, **kwargs):
    loader = dict(batch_size=2, dataset=dict(type="Values"), num_workers=0)
    out = dict(type="DumpResults", out_file_path=str(folder / "results.pkl"))
    values = dict(
        model=dict(type="Double"),
        work_dir=str(folder / "work"),
        test_dataloader=loader,
        test_cfg={},
        test_evaluator=out,
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(report=None),
    )
    return Config({**values, **kwargs})


def test_test_time_augmentation_merges_the_predictions_of_all_versions(tmp_path):
    cfg = config(tmp_path, tta_model=dict(type="Largest"), tta_pipeline=[1.0, 5.0, -3.0])
    runner = build_runner_with_tta(cfg)
    runner.test()
    assert type(runner.model) is Largest
    # 2 * (index + 5), the prediction for the version with the largest value
    assert [value.tolist() for value in fileio.load(str(tmp_path / "results.pkl"))] == [
        [10, 10],
        [12, 12],
        [14, 14],
        [16, 16],
    ]
    model = runner.model
    runner.test()
    assert runner.model is model
    with pytest.raises(ConfigError, match="tta_model: is required"):
        build_runner_with_tta(config(tmp_path, tta_pipeline=[1]))


def test_the_hub_of_a_run_is_filled_and_found_by_the_run_name(tmp_path):
    seen = []

    class Look(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            hub = MessageHub.get_instance(runner.experiment_name)
            assert hub is runner.message_hub is MessageHub.get_current_instance()
            seen.append(hub.get_info("iter"))

    runner = Runner.from_cfg(config(tmp_path, experiment_name="tiny", custom_hooks=[Look()]))
    runner.train()
    assert len(seen) == 4
    hub = MessageHub.get_instance(runner.experiment_name)
    assert len(hub.get_scalar("train/loss").data[0]) == 4


def test_a_loader_that_a_script_builds_yields_lists():
    cfg = dict(batch_size=3, dataset=dict(type="Values"), sampler=dict(type="DefaultSampler", shuffle=False))
    first, second = Runner.build_dataloader(cfg)
    assert [value.tolist() for value in first["inputs"]] == [[1, 1], [2, 2], [3, 3]]
    assert len(second["inputs"]) == 1


def test_load_or_resume_before_training_restores_the_complete_state(tmp_path):
    Runner.from_cfg(config(tmp_path)).train()
    cfg = config(tmp_path, resume=True)
    cfg.train_cfg.max_epochs = 3
    runner = Runner.from_cfg(cfg)
    assert (runner.epoch, runner.iter) == (0, 0)
    runner.load_or_resume()
    assert (runner.epoch, runner.iter) == (2, 4)
    restored = runner.model.weight.detach().clone()
    saved = torch.load(tmp_path / "work/epoch_2.pth", weights_only=True)["state_dict"]["weight"]
    assert torch.equal(restored, saved)
    runner.load_or_resume()  # a second call has no effect
    runner.train()
    assert runner.iter == 6
    assert not torch.equal(runner.model.weight, restored)


@pytest.mark.slow
@pytest.mark.parametrize("speed", [{}, {"compile": True}])
def test_frozen_parameters_in_the_only_group_are_not_trained(tmp_path, speed):
    model = Double()
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = dict(type="AdamW", lr=0.1, weight_decay=0.5)
    cfg = config(tmp_path, optim_wrapper=dict(optimizer=optimizer), speed=speed)
    cfg.train_cfg.max_epochs = 10
    cfg.train_dataloader.batch_size = 4
    runner = Runner(**{**cfg.to_dict(), "model": model})
    runner.train()
    assert torch.equal(model.frozen, torch.ones(2))
    expected = nn.Parameter(torch.full((2,), 2.0))
    optim = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.5)
    for _ in range(10):  # each batch contains all samples
        optim.zero_grad()
        torch.stack([expected * k for k in (1.0, 2.0, 3.0, 4.0)]).mean().backward()
        optim.step()
    torch.testing.assert_close(model.weight, expected, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "work/epoch_10.pth", weights_only=True)["optimizer"]
    assert [len(group["params"]) for group in saved["param_groups"]] == [2]
