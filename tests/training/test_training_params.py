"""The keys of SuperGradients' training_params: names, types, and errors for unsupported values."""

import dataclasses
import re

import pytest

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.speed import PARAMS_OPTIONS
from slipstream.training.params import UNSUPPORTED, TrainingParams

# Keys in SuperGradients' documentation, default_train_params.yaml and params.py.
KEYS = re.findall(
    r"\w+",
    """
max_epochs lr_mode initial_lr lr_warmup_epochs lr_warmup_steps lr_cooldown_epochs warmup_initial_lr warmup_mode
lr_updates lr_decay_factor cosine_final_lr_ratio optimizer optimizer_params zero_weight_decay_on_bias_and_bn loss
criterion_params ema ema_params train_metrics_list valid_metrics_list metric_to_watch
greater_metric_to_watch_is_better precise_bn sync_bn mixed_precision batch_accumulate run_validation_freq save_model
save_ckpt_epoch_list average_best_models ckpt_best_name resume resume_path seed phase_callbacks clip_grad_norm
max_train_batches max_valid_batches sg_logger torch_compile torch_compile_loss torch_compile_options
torch_compile_mode silent_mode finetune launch_tensorboard tensorboard_port tb_files_user_prompt
save_tensorboard_to_s3 log_installed_packages save_full_train_log dataset_statistics pre_prediction_callback
loss_logging_items_names load_opt_params sg_logger_params precise_bn_batch_size multiply_head_lr
step_lr_update_freq lr_schedule_function run_test_freq save_tensorboard_remote enable_qat kill_ddp_pgroup_on_end
ckpt_name run_id resume_from_remote_sg_logger resume_strict_load speed
""",
)


def test_each_supergradients_key_exists():
    fields = {f.name for f in dataclasses.fields(TrainingParams)}
    assert set(KEYS) <= fields
    assert {*PARAMS_OPTIONS, *UNSUPPORTED} <= fields


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_key_raises_an_error_with_the_reason(key):
    default = getattr(TrainingParams(), key)
    with pytest.raises(ConfigError, match=rf"training_params\.{key}: "):
        TrainingParams.read({key: not default if isinstance(default, bool) else 6006})


def test_unknown_key_error_suggests_the_nearest_key():
    with pytest.raises(UnknownNameError, match=r"training_params\.max_epoch: .*did you mean 'max_epochs'"):
        TrainingParams.read(dict(max_epoch=3))
