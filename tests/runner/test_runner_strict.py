"""Values of the wrong type or out of range raise an error that starts with the path of the key.

Most of the cases were found by fuzzing.
"""

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.config import Config
from slipstream.errors import ConfigError, DistributedError, SlipstreamError
from slipstream.model import BaseModule
from slipstream.runner import Runner
from tiny_runs import loader, training, validation

SGD = dict(type="SGD", lr=0.1)
EPOCHS = dict(by_epoch=True, max_epochs=1)


def optimizer(**options):
    return dict(optim_wrapper=dict(optimizer={**SGD, **options}))


def wrapper(**options):
    return dict(optim_wrapper=dict(optimizer={**SGD, "weight_decay": 0.1}, **options))


def paramwise(**options):
    return wrapper(paramwise_cfg=options)


def hook(**options):
    return dict(custom_hooks=[options])


def scheduler(**options):
    return dict(param_scheduler=[dict(type="ConstantLR"), options])


CASES = [
    # options that earlier versions silently changed or ignored
    (dict(auto_scale_lr=dict(enabled=True)), "auto_scale_lr.enabled", "did you mean 'enable'"),
    (dict(auto_scale_lr=dict(enable="false", base_batch_size=8)), "auto_scale_lr.enable", "must be a bool"),
    (dict(auto_scale_lr=dict(enable=False, base_batch_size=-8)), "auto_scale_lr.base_batch_size", "at least 1"),
    (dict(auto_scale_lr=[1]), "auto_scale_lr", "[1]"),
    *((optimizer(lr=lr), "optim_wrapper.optimizer.lr", "") for lr in (math.nan, math.inf, -1, "1e-3", True, [0.1])),
    *((optimizer(weight_decay=wd), "optim_wrapper.optimizer.weight_decay", "") for wd in (math.nan, -0.1, "0")),
    *((optimizer(momentum=m), "optim_wrapper.optimizer.momentum", "between 0 and 1") for m in (2.5, -0.1, "0.9")),
    (optimizer(nesterov="false"), "optim_wrapper.optimizer.nesterov", "must be a bool"),
    (optimizer(type="AdamW", betas=(0.9, 1.5)), "optim_wrapper.optimizer.betas", "between 0 and 1"),
    (optimizer(type="AdamW", betas=(0.9, math.nan)), "optim_wrapper.optimizer.betas[1]", "finite"),
    (optimizer(type="AdamW", eps=-1), "optim_wrapper.optimizer.eps", "-1"),
    (paramwise(bias_lr_mult=-1), "optim_wrapper.paramwise_cfg.bias_lr_mult", "-1"),
    (paramwise(custom_keys=dict(bias=dict(lr_mult=-1))), "optim_wrapper.paramwise_cfg.custom_keys.bias.lr_mult", "-1"),
    (paramwise(custom_keys=dict(bias=dict(lr=math.nan))), "optim_wrapper.paramwise_cfg.custom_keys.bias.lr", "nan"),
    (paramwise(custom_keys=dict(bias={3: 1})), "optim_wrapper.paramwise_cfg.custom_keys", "3"),
    (wrapper(clip_grad=dict(max_norm=math.nan)), "optim_wrapper.clip_grad.max_norm", "nan"),
    (wrapper(clip_grad=dict(max_norm=-1)), "optim_wrapper.clip_grad.max_norm", "-1"),
    (wrapper(clip_grad=dict(max_norm=1, norm_type="2")), "optim_wrapper.clip_grad.norm_type", "'2'"),
    *((wrapper(accumulative_counts=n), "optim_wrapper.accumulative_counts", repr(n)) for n in (0, 2.5, True, "2")),
    (wrapper(type="AmpOptimWrapper", loss_scale=math.inf), "optim_wrapper.loss_scale", "inf"),
    (
        wrapper(type="AmpOptimWrapper", loss_scale=dict(init_scale=math.nan)),
        "optim_wrapper.loss_scale.init_scale", "nan",
    ),
    (wrapper(type="AmpOptimWrapper", loss_scale=dict(init=1)), "optim_wrapper.loss_scale.init", "did you mean"),
    # train_cfg
    *((dict(train_cfg=dict(by_epoch=True, max_epochs=n)), "train_cfg.max_epochs", "") for n in (True, 2.5, math.nan)),
    *((dict(train_cfg=dict(by_epoch=False, max_iters=n)), "train_cfg.max_iters", "") for n in (-1, "3", math.inf)),
    *((dict(train_cfg=dict(**EPOCHS, val_interval=n)), "train_cfg.val_interval", "") for n in (0, 0.5, True, "1")),
    (dict(train_cfg=dict(**EPOCHS, val_begin=-1)), "train_cfg.val_begin", "-1"),
    (dict(train_cfg=dict(**EPOCHS, dynamic_intervals=[(1, math.nan)])), "train_cfg.dynamic_intervals", "nan"),
    (dict(train_cfg=dict(by_epoch="true", max_epochs=1)), "train_cfg.by_epoch", "must be a bool, not 'true'"),
    # data
    *((dict(train_dataloader=loader(batch_size=n)), "train_dataloader.batch_size", "") for n in (-1, 2.5, "4", 10**18)),
    (dict(train_dataloader=loader(num_workers=-1)), "train_dataloader.num_workers", "-1"),
    (dict(train_dataloader=loader(pin_memory="no")), "train_dataloader.pin_memory", "'no'"),
    (dict(train_dataloader=loader(num_batch_per_epoch=1.5)), "train_dataloader.num_batch_per_epoch", "1.5"),
    (dict(train_dataloader=loader("abc")), "train_dataloader.dataset", "'abc'"),
    (dict(train_dataloader=dict(loader(), sampler=2.5)), "train_dataloader.sampler", "2.5"),
    (dict(train_dataloader=dict(loader(), sampler="auto")), "train_dataloader.sampler", "'auto'"),
    (dict(train_dataloader=dict(loader(), sampler=[dict(type="DefaultSampler")])), "train_dataloader.sampler", "Def"),
    (dict(train_dataloader=dict(loader(), batch_sampler=3)), "train_dataloader.batch_sampler", "3"),
    (dict(train_dataloader=loader([TensorDataset(torch.ones(1))])), "train_dataloader.dataset", "ConcatDataset"),
    (dict(train_dataloader={**loader(), "collate_fn": -1}), "train_dataloader.collate_fn", "-1"),
    (dict(train_dataloader={**loader(), "collate_fn": dict(type=3)}), "train_dataloader.collate_fn.type", "3"),
    (
        dict(train_dataloader={**loader(), "collate_fn": dict(type="default_collate", x=1)}),
        "train_dataloader.collate_fn", "'x'",
    ),
    (dict(train_dataloader={**loader(), 3: 1}), "train_dataloader", "'3'"),
    # schedulers
    *((scheduler(type="StepLR", step_size=1, gamma=g), "param_scheduler[1]", "") for g in (0, -1)),
    *((scheduler(type="ExponentialLR", gamma=g), "param_scheduler[1].gamma", repr(g)) for g in (math.nan, "1")),
    (scheduler(type="LinearLR", begin=-1), "param_scheduler[1]", "begin"),
    (scheduler(type="LinearLR", end=2.5), "param_scheduler[1].end", "2.5"),
    (scheduler(type="CosineAnnealingLR", T_max=0), "param_scheduler[1]", "T_max"),
    (scheduler(type="CosineAnnealingLR", T_max=2, eta_min=-1), "param_scheduler[1]", "eta_min"),
    (scheduler(type="PolyLR", eta_min=math.nan), "param_scheduler[1].eta_min", "nan"),
    (scheduler(type="MultiStepLR", milestones=[1, "2"]), "param_scheduler[1].milestones", "'2'"),
    (scheduler(type="ConstantLR", by_epoch="true"), "param_scheduler[1].by_epoch", "'true'"),
    (scheduler(type="CosineAnnealingWarmRestarts", T_0=1, eta_min=math.nan), "param_scheduler[1].eta_min", "nan"),
    (scheduler(begin=1, convert_to_iter_based=True), "param_scheduler[1]", "'type'"),
    *((dict(param_scheduler=s), "param_scheduler", "must be a scheduler") for s in (3, "StepLR", math.nan, object())),
    (dict(param_scheduler=[[]]), "param_scheduler[0]", "must be a scheduler"),
    # hooks
    (hook(type="EMAHook", momentum=math.nan), "custom_hooks[0].momentum", "nan"),
    (hook(type="EMAHook", momentum=1.5), "custom_hooks[0].momentum", "between 0 and 1"),
    (hook(type="EMAHook", interval=0), "custom_hooks[0].interval", "0"),
    (hook(type="EMAHook", priority=[1]), "custom_hooks[0]", "priority"),
    (hook(type="EMAHook", priority=math.nan), "custom_hooks[0]", "priority"),
    (hook(type="EarlyStoppingHook", monitor="acc", min_delta=-1), "custom_hooks[0].min_delta", "-1"),
    (hook(type="EarlyStoppingHook", monitor="acc", patience=2.5), "custom_hooks[0].patience", "2.5"),
    (hook(type="PreciseBNHook", num_samples=0), "custom_hooks[0].num_samples", "0"),
    (hook(type=3), "custom_hooks[0].type", "3 is not callable"),
    (dict(custom_hooks=dict(type="EMAHook")), "custom_hooks", "must be a list or None"),
    (dict(custom_hooks=[3]), "custom_hooks[0]", "a hook must be"),
    (dict(default_hooks=[]), "default_hooks", "must be a dict or None"),
    (dict(default_hooks=dict(logger=3)), "default_hooks.logger", "must be a hook"),
    (dict(default_hooks=dict(logger=dict(type="LoggerHook", interval="2"))), "default_hooks.logger.interval", "'2'"),
    # other keys
    *((dict(randomness=dict(seed=seed)), "randomness.seed", "") for seed in ("1", -1, math.nan, True, 2**64)),
    (dict(randomness=dict(deterministic=1)), "randomness.deterministic", "must be a bool"),
    (dict(env_cfg=dict(mp_cfg=dict(mp_start_method="\0"))), "env_cfg.mp_cfg.mp_start_method", "'fork' or 'spawn'"),
    (dict(env_cfg=dict(mp_cfg=dict(start_method="fork"))), "env_cfg.mp_cfg.start_method", "did you mean"),
    (dict(env_cfg=dict(dist_cfg=3)), "env_cfg.dist_cfg", "3"),
    (dict(env_cfg=dict(mp_cfg=3)), "env_cfg.mp_cfg", "3"),
    (dict(env_cfg=dict(resource_limit=-1)), "env_cfg.resource_limit", "-1"),
    *((dict(log_level=level), "log_level", "") for level in (["INFO"], 1.5, True, -3, dict(a=1))),
    (dict(log_processor=3), "log_processor", "must be an object"),
    (dict(log_processor=dict(num_digits=-1)), "log_processor.num_digits", "between 0 and 20"),
    (dict(log_processor=dict(window_size=2.5)), "log_processor.window_size", "2.5"),
    (dict(visualizer=0.5), "visualizer", "must be an object"),
    (dict(visualizer=dict(vis_backends=[1])), "visualizer.vis_backends[0]", "must be a backend"),
    (dict(launcher=dict(a=1)), "launcher", "must be a str"),
    (dict(load_from=3), "load_from", "3"),
    (dict(resume=3), "resume", "3"),
    (dict(work_dir=3), "work_dir", "3"),
    (dict(work_dir="a\0b"), "work_dir", "a folder"),
    (dict(work_dir=""), "work_dir", "a folder"),
    (dict(work_dir=__file__), "work_dir", "Not a directory"),
    (dict(work_dir=f"{__file__}/runs"), "work_dir", "cannot create a folder"),
    (dict(work_dir="x" * 300), "work_dir", "File name too long"),
    (dict(experiment_name=[1]), "experiment_name", "[1]"),
    (dict(default_scope=3), "default_scope", "3"),
    (dict(speed=dict(prefetch=10**18)), "speed.prefetch", "from 0 to 1024"),
    (dict(speed={3: 1}), "speed.3", "no such option"),
    (dict(cfg=dict(model_wrapper_cfg=dict(broadcast_buffers="no"))), "model_wrapper_cfg.broadcast_buffers", "'no'"),
    (dict(cfg=dict(model_wrapper_cfg=dict(type=3))), "model_wrapper_cfg.type", "3"),
    ({**validation(), "val_cfg": dict(fp16="yes")}, "val_cfg.fp16", "'yes'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "path", "hint"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_error_starts_with_the_path_of_the_key(tmp_path, changes, path, hint):
    with pytest.raises(SlipstreamError) as raised:
        Runner(**{**training(tmp_path), **changes}).train()
    assert str(raised.value).startswith(f"{path}: ")
    assert hint in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_dist_cfg_is_also_checked_in_a_single_process(tmp_path):
    with pytest.raises(DistributedError, match="dist_cfg has no option 'timout'; did you mean 'timeout'"):
        Runner(**training(tmp_path, env_cfg=dict(dist_cfg=dict(timout=3))))


@pytest.mark.parametrize("init_cfg", [3, [None], ["Kaiming"]])
def test_init_cfg_must_consist_of_dicts(init_cfg):
    with pytest.raises(ConfigError, match=r"^init_cfg: must be a dict"):
        BaseModule(init_cfg)


def test_infinite_clipping_limit_and_long_runs_are_accepted(tmp_path):
    class EndOfTestError(Exception):
        pass

    class Stop(Runner):
        def call_hook(self, fn_name, **kwargs):
            super().call_hook(fn_name, **kwargs)
            if fn_name == "after_train_epoch":
                raise EndOfTestError

    logger = dict(type="LoggerHook", interval=1)
    changes = dict(
        train_cfg=dict(by_epoch=True, max_epochs=10**18),
        default_hooks=dict(logger=logger),
        **wrapper(clip_grad=dict(max_norm=math.inf)),
    )
    with pytest.raises(EndOfTestError):
        Stop.from_cfg(Config(training(tmp_path, **changes))).train()
