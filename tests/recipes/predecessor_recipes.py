"""Recipes in SuperGradients' format, including its group names, resolvers, `_target_` entries and deprecated keys."""

REGSEG48 = """
defaults:
  - training_hyperparams: default_train_params
  - dataset_params: cityscapes_regseg48_dataset_params
  - checkpoint_params: default_checkpoint_params
  - _self_
  - variable_setup

train_dataloader: cityscapes_train
val_dataloader: cityscapes_val
cityscapes_ignored_label: 19

architecture: regseg48
arch_params:
  num_classes: 19
  strict_load: no_key_matching

load_checkpoint: False
resume: False
training_hyperparams:
  sync_bn: True
  resume: ${resume}
  max_epochs: 800
  lr_mode: poly
  initial_lr: 0.02
  lr_warmup_epochs: 0
  optimizer: SGD
  optimizer_params: {momentum: 0.9, weight_decay: 5e-4}
  ema: True
  loss: cross_entropy
  criterion_params:
    ignore_index: ${cityscapes_ignored_label}
  train_metrics_list:
    - PixelAccuracy: {ignore_label: "${cityscapes_ignored_label}"}
    - IoU: {num_classes: 20, ignore_index: "${cityscapes_ignored_label}"}
  valid_metrics_list:
    - PixelAccuracy: {ignore_label: "${cityscapes_ignored_label}"}
    - IoU: {num_classes: 20, ignore_index: "${cityscapes_ignored_label}"}
  metric_to_watch: IoU
  greater_metric_to_watch_is_better: True
  _convert_: all

project_name: RegSeg
experiment_name: ${architecture}_cityscapes
ckpt_root_dir:
multi_gpu: AUTO
num_gpus: 4

hydra:
  searchpath:
    - pkg://super_gradients.recipes
  run:
    dir: ${hydra_output_dir:${ckpt_root_dir}, ${experiment_name}}
  callbacks:
    shortcuts_cb:
      _target_: super_gradients.common.environment.omegaconf_utils.RecipeShortcutsCallback
"""

DDRNET = """
defaults:
  - training_hyperparams: cityscapes_default_train_params
  - dataset_params: cityscapes_ddrnet_dataset_params
  - checkpoint_params: default_checkpoint_params
  - _self_
  - variable_setup

train_dataloader: cityscapes_train
val_dataloader: cityscapes_val
architecture: ddrnet_23_slim

training_hyperparams:
  max_epochs: 500
  initial_lr: 0.0075
  loss:
    dice_ce_edge_loss:
      num_classes: 19
      ignore_index: 19
      num_aux_heads: 1
      num_detail_heads: 0
      weights: [ 1., 0.4 ]
      dice_ce_weights: [ 1., 1. ]
      ce_edge_weights: [ .5, .5 ]
      edge_kernel: 5
  sync_bn: True

arch_params:
  num_classes: 19
  use_aux_heads: True

load_checkpoint: False
checkpoint_params:
  load_checkpoint: ${load_checkpoint}
  checkpoint_path:
  load_backbone: True
  strict_load:
    _target_: super_gradients.training.sg_trainer.StrictLoad
    value: no_key_matching

experiment_name: ${architecture}_cityscapes
multi_gpu: DDP
num_gpus: 4
"""

STDC_SEG75 = """
defaults:
  - training_hyperparams: cityscapes_default_train_params
  - dataset_params: cityscapes_stdc_seg75_dataset_params
  - checkpoint_params: default_checkpoint_params
  - _self_

train_dataloader: cityscapes_train
val_dataloader: cityscapes_val
architecture: stdc1_seg

arch_params:
  num_classes: 19
  use_aux_heads: True
  sync_bn: True

checkpoint_params:
  checkpoint_path:
  load_backbone: True
  load_weights_only: True
  strict_load: no_key_matching

training_hyperparams:
  initial_lr: {"cp": 0.005, default: 0.05}
  lr_updates:
    _target_: super_gradients.training.utils.utils.empty_list
  loss:
    stdc_loss:
      num_classes: 19
      ignore_index: 19
      mining_percent: 0.0625
      weights: [ 1., 0.6, 0.4, 1. ]

multi_gpu: DDP
num_gpus: 4
experiment_name: ${architecture}75_cityscapes
ckpt_root_dir:

hydra:
  run:
    dir: ${hydra_output_dir:${ckpt_root_dir}, ${experiment_name}}
"""

RECIPES = {"regseg48": REGSEG48, "ddrnet": DDRNET, "stdc_seg75": STDC_SEG75}
