"""Translation of training_params, network and loaders to a Runner configuration."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.registry import HOOKS
from slipstream.speed import SpeedPlan
from slipstream.training.metrics import Accuracy, IoU, PixelAccuracy
from slipstream.training.translate import runner_config, work_dir

PARAMS = dict(max_epochs=4, initial_lr=0.1, lr_mode="poly", loss="CrossEntropyLoss")
DATA = dict(batch_size=2, dataset=dict(type="StreetScenes", length=4))
NETWORK = dict(type="resnet18", num_classes=2)


def translated(*, params=None, **changes):
    return runner_config(
        **{
            "experiment_name": "exp",
            "ckpt_root_dir": "/runs",
            "network": NETWORK,
            "training_params": {**PARAMS, **(params or {})},
            "train_dataloader": DATA,
            "val_dataloader": DATA,
            **changes,
        }
    )


def hook(cfg, kind):
    return next((h for h in cfg["custom_hooks"] if isinstance(h, dict) and h["type"] == kind), None)


def test_plain_recipe_is_translated_to_a_plain_configuration():
    cfg = translated(
        params=dict(
            valid_metrics_list=["PixelAccuracy"], metric_to_watch="PixelAccuracy", ema=True, precise_bn=True
        )
    )
    assert json.loads(json.dumps(cfg)) == cfg


def test_loops_work_dir_and_seed_are_translated():
    cfg = translated(params=dict(run_validation_freq=3, seed=7))
    assert cfg["train_cfg"] == dict(by_epoch=True, max_epochs=4, val_interval=3)
    assert (cfg["work_dir"], cfg["experiment_name"]) == ("/runs/exp", "exp")
    assert cfg["randomness"] == dict(seed=7)
    assert work_dir("exp", None) == "work_dirs/exp"


def test_supergradients_defaults_set_no_speed_options():
    options = dict(mixed_precision=False, ema=False, sync_bn=True, batch_accumulate=1, clip_grad_norm=2.5)
    words = translated(params=options)["training_params"]
    assert words == dict(sync_bn=True, clip_grad_norm=2.5)
    assert SpeedPlan.read(dict(ema=True), training_params=words).ema is not None


def test_batches_are_limited_in_configurations_and_loader_objects():
    ready = DataLoader(TensorDataset(torch.zeros(8, 4)), 2)
    cfg = translated(params=dict(max_train_batches=3, max_valid_batches=1), val_dataloader=ready)
    assert cfg["train_dataloader"] == {**DATA, "num_batch_per_epoch": 3}
    assert cfg["val_dataloader"] == {"dataloader": ready, "num_batch_per_epoch": 1}
    assert translated(val_dataloader=ready)["val_dataloader"] is ready


def test_network_and_loss_can_be_objects():
    network, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    model = translated(network=network, params=dict(loss=loss), num_classes=2)["model"]
    assert model == dict(type="SupervisedModel", network=network, loss=loss, num_classes=2)


def test_pretrained_weights_are_passed_to_the_model():
    pretrained = dict(checkpoint_path="w.pth", strict_load=False, load_backbone=True)
    assert translated(pretrained=pretrained)["model"]["pretrained"] == pretrained


def test_validation_loop_has_the_validation_metrics():
    cfg = translated(params=dict(valid_metrics_list=["Accuracy"]), test_dataloader=DATA)
    assert cfg["test_dataloader"] == DATA
    assert cfg["test_evaluator"] == cfg["val_evaluator"] == [dict(type="Top1")]
    assert "test_cfg" not in translated()


# ---- checkpoints and hooks -------------------------------------------------------------------------------


def test_checkpoint_hook_has_supergradients_file_names_and_metric_to_watch():
    params = dict(
        valid_metrics_list=["PixelAccuracy"],
        metric_to_watch="pixel_accuracy",
        greater_metric_to_watch_is_better=False,
        ckpt_best_name="best_of_all.pth",
        save_ckpt_epoch_list=[1, 3],
        run_validation_freq=2,
    )
    cfg = translated(params=params)
    assert cfg["default_hooks"]["checkpoint"] == dict(
        type="CheckpointHook",
        interval=2,
        filename_tmpl="ckpt_latest.pth",
        save_best="PixelAccuracy",
        rule="less",
        best_filename="best_of_all.pth",
        save_epochs=[1, 3],
    )
    assert hook(cfg, "AverageBestHook") == dict(type="AverageBestHook", metric="PixelAccuracy", rule="less")


def test_no_metric_is_monitored_without_metrics_or_metric_to_watch():
    for params in ({}, dict(valid_metrics_list=["Accuracy"], metric_to_watch=None)):
        cfg = translated(params=params)
        assert "save_best" not in cfg["default_hooks"]["checkpoint"]
        assert hook(cfg, "AverageBestHook") is None


def test_save_model_false_disables_checkpoints():
    cfg = translated(params=dict(save_model=False, valid_metrics_list=["Accuracy"]))
    assert cfg["default_hooks"] == dict(checkpoint=None)
    assert hook(cfg, "AverageBestHook") is None


def test_unknown_metric_to_watch_raises_an_error():
    with pytest.raises(
        UnknownNameError, match=r"training_params\.metric_to_watch: .*'Accuracy'.*available: PixelAccuracy"
    ):
        translated(params=dict(valid_metrics_list=["PixelAccuracy"]))
    with pytest.raises(UnknownNameError, match=r"metric_to_watch: .*'Loss'.*available: IoU, Accuracy"):
        translated(params=dict(valid_metrics_list=[IoU(3), Accuracy()], metric_to_watch="Loss"))


def test_metric_to_watch_matches_metric_objects_in_any_spelling():
    params = dict(valid_metrics_list=[PixelAccuracy()], metric_to_watch="pixel_accuracy")
    assert translated(params=params)["default_hooks"]["checkpoint"]["save_best"] == "PixelAccuracy"


def test_each_translated_hook_exists():
    cfg = translated(
        params=dict(precise_bn=True, train_metrics_list=["Accuracy"], valid_metrics_list=["Accuracy"])
    )
    kinds = [h["type"] for h in [*cfg["custom_hooks"], cfg["default_hooks"]["checkpoint"]]]
    assert {"TrainMetricsHook", "PreciseBNHook", "AverageBestHook"} <= set(kinds)
    for entry in [*cfg["custom_hooks"], cfg["default_hooks"]["checkpoint"]]:
        HOOKS.build(entry)


def test_precise_bn_uses_the_requested_number_of_samples():
    assert (
        hook(translated(params=dict(precise_bn=True, precise_bn_batch_size=64)), "PreciseBNHook")[
            "num_samples"
        ]
        == 64
    )
    assert hook(translated(params=dict(precise_bn_batch_size=64)), "PreciseBNHook") is None


@pytest.mark.parametrize(
    ("params", "resume"),
    [
        ({}, False),
        (dict(resume=True), True),
        (dict(resume=True, ckpt_name="ckpt_best.pth"), "/runs/exp/ckpt_best.pth"),
        (dict(ckpt_name="ckpt_best.pth"), False),
        (dict(resume_path="/else/where.pth"), "/else/where.pth"),
    ],
)
def test_resume_keys_select_the_checkpoint(params, resume):
    assert translated(params=params)["resume"] == resume


# ---- loggers ---------------------------------------------------------------------------------------------


def backends(**params):
    return translated(params=params)["visualizer"]["vis_backends"]


def test_loggers_can_be_names_or_objects():
    files = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
    assert backends() == backends(sg_logger="base_sg_logger") == files
    words = dict(project_name="p", entity="e", wandb_id="1", save_checkpoints_remote=False)
    assert backends(sg_logger="wandb_sg_logger", sg_logger_params=words) == [
        *files,
        dict(type="WandbVisBackend", init_kwargs=dict(name="exp", project="p", entity="e", id="1")),
    ]
    assert backends(sg_logger=dict(type="MLflowVisBackend")) == [*files, dict(type="MLflowVisBackend")]
    assert translated(params=dict(silent_mode=True))["log_level"] == "WARNING"


def test_launching_tensorboard_only_logs_a_warning(caplog):
    translated(params=dict(sg_logger_params=dict(launch_tensorboard=False)))
    assert not caplog.records
    translated(params=dict(sg_logger_params=dict(launch_tensorboard=True)))
    assert "sg_logger_params.launch_tensorboard has no effect" in caplog.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(sg_logger="wandb_logger"), r"sg_logger: .*did you mean 'wandb_sg_logger'"),
        (
            dict(sg_logger_params=dict(project="p")),
            r"sg_logger_params\.project: .*did you mean 'project_name'",
        ),
        (
            dict(sg_logger_params=dict(save_logs_remote=True)),
            r"sg_logger_params\.save_logs_remote: logs are saved only",
        ),
        (dict(loss=None), r"loss: a loss is required; use one of BCEDiceLoss"),
        (dict(max_epochs=None), r"max_epochs: is required"),
        (dict(max_epoch=3), r"max_epoch: .*did you mean 'max_epochs'"),
    ],
)
def test_unsupported_values_raise_errors_with_their_key(params, message):
    with pytest.raises(ConfigError, match=rf"training_params\.{message}"):
        translated(params=params)
