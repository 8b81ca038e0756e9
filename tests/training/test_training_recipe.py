"""Tests of old checkpoint keys and misspelled sections in recipes, and of errors with the user's config paths."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.training import Trainer
from slipstream.training.metrics import PixelAccuracy
from slipstream.training.recipe import recipe_config


class Own(PixelAccuracy):
    """A custom metric whose result names are unknown until its first evaluation."""


def recipe(**sections):
    return dict(
        experiment_name="exp",
        architecture="regseg48",
        arch_params=dict(num_classes=19),
        train_dataloader="street_scenes_train",
        val_dataloader="street_scenes_val",
        training_hyperparams=dict(max_epochs=1, initial_lr=0.1, loss="CrossEntropyLoss"),
        **sections,
    )


@pytest.mark.parametrize("key", ["training_parms", "dataset_param", "arch_parms"])
def test_misspelled_section_raises_an_error(key):
    with pytest.raises(UnknownNameError, match=rf"{key}: unknown key; did you mean"):
        recipe_config(recipe(**{key: dict(max_epochs=3)}))


# ---- config paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "config_path"),
    [
        (dict(ema=True, ema_params=dict(decay_type="expo")), "ema_params.decay_type"),
        (
            dict(torch_compile=True, torch_compile_options=dict(backend="nope")),
            "torch_compile_options.backend",
        ),
        (dict(torch_compile=True, torch_compile_mode="fast"), "torch_compile_mode"),
        (dict(finetune=True), "finetune"),
        (dict(lr_mode=dict(StepLR=dict(phase="TRAIN_EPOCH_END", step_siz=1))), "lr_mode"),
        (dict(optimizer="Adm"), "optimizer"),
        (dict(optimizer_params=dict(momentm=0.1)), "optimizer_params"),
        (dict(criterion_params=dict(ignor=1)), "criterion_params"),
        (dict(valid_metrics_list=["PixelAccuracy", dict(IoU=dict(num_clases=2))]), "valid_metrics_list[1]"),
        (dict(train_metrics_list=[dict(IoU=dict(num_clases=2))]), "train_metrics_list[0]"),
        (dict(valid_metrics_list=[Own()], metric_to_watch="IoU"), "metric_to_watch"),
        (
            dict(valid_metrics_list=[Own()], metric_to_watch="IoU", average_best_models=False),
            "metric_to_watch",
        ),
        (
            dict(
                precise_bn=True,
                phase_callbacks=[dict(EarlyStop=dict(phase="VALIDATION_EPOCH_END", monitor="x"))],
            ),
            "phase_callbacks[0].monitor",
        ),
    ],
)
def test_runner_errors_contain_the_users_config_paths(tmp_path, invalid, config_path):
    data = DataLoader(TensorDataset(torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4).long()))
    params = dict(max_epochs=1, initial_lr=0.1, loss="CrossEntropyLoss", metric_to_watch=None)
    params |= dict(valid_metrics_list=["PixelAccuracy"], silent_mode=True)
    with pytest.raises(ConfigError) as caught:
        Trainer("exp", tmp_path).train(nn.Conv2d(3, 2, 1), {**params, **invalid}, data, data)
    assert caught.value.path == f"training_params.{config_path}"
