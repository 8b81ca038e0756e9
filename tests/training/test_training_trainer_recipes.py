"""Tests of the Trainer with recipes: training, resuming, evaluation, and pretrained weights."""

import pytest
import torch

from slipstream import Trainer
from slipstream.errors import CheckpointError, ConfigError
from slipstream.training import models


def assert_same(module, other):
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


def recipe(tmp_path, **params):
    data = dict(
        train_dataset_params=dict(length=4, size=[32, 64]),
        val_dataset_params=dict(length=2, size=[32, 64]),
        train_dataloader_params=dict(batch_size=2, num_workers=0),
        val_dataloader_params=dict(batch_size=2, num_workers=0),
    )
    hyperparams = dict(
        max_epochs=1,
        initial_lr=0.01,
        loss=dict(CrossEntropyLoss=dict(ignore_index=255)),
        valid_metrics_list=[dict(IoU=dict(num_classes=20, ignore_index=255))],
        metric_to_watch="IoU",
        silent_mode=True,
        average_best_models=False,
    )
    return dict(
        experiment_name="exp",
        ckpt_root_dir=str(tmp_path),
        architecture="regseg48",
        arch_params=dict(num_classes=19),
        train_dataloader="street_scenes_train",
        val_dataloader="street_scenes_val",
        dataset_params=data,
        training_hyperparams={**hyperparams, **params},
    )


def test_recipe_is_trained_resumed_and_evaluated(tmp_path):
    from omegaconf import OmegaConf

    net, history = Trainer.train_from_config(OmegaConf.create(recipe(tmp_path)))
    assert [entry["epoch"] for entry in history] == [1]
    evaluated, metrics = Trainer.evaluate_from_recipe(recipe(tmp_path))
    assert metrics["IoU"] == pytest.approx(history[-1]["IoU"])
    assert_same(evaluated, net)
    with pytest.raises(CheckpointError, match=r"ckpt_worst\.pth does not exist"):
        Trainer.evaluate_from_recipe(recipe(tmp_path, ckpt_name="ckpt_worst.pth"))
    with pytest.raises(ConfigError) as misspelled:
        Trainer.evaluate_from_recipe(recipe(tmp_path, valid_metrics_list=[dict(IoU=dict(num_clases=20))]))
    assert misspelled.value.path == "training_params.valid_metrics_list[0]"
    # The last validation ran after the checkpoint was saved, so the resumed run repeats it.
    again, last = Trainer.resume_experiment("exp", tmp_path)
    assert [entry["epoch"] for entry in last] == [1]
    assert last[0]["IoU"] == pytest.approx(history[0]["IoU"])
    assert_same(again, net)


def test_weights_from_a_run_initialize_another_network(tmp_path):
    net, _ = Trainer.train_from_config(recipe(tmp_path))
    again = models.get("regseg48", num_classes=19, checkpoint_path=tmp_path / "exp" / "ckpt_best.pth")
    assert_same(again, net)


def test_recipe_with_pretrained_backbone_is_evaluated_with_its_trained_weights(tmp_path):
    backbone = tmp_path / "backbone.pth"
    torch.save(models.get("regseg48", num_classes=19).backbone.state_dict(), backbone)
    start = dict(checkpoint_params=dict(checkpoint_path=str(backbone), load_backbone=True))
    net, _ = Trainer.train_from_config(recipe(tmp_path) | start)
    evaluated, _ = Trainer.evaluate_from_recipe(recipe(tmp_path) | start)
    assert_same(evaluated, net)
