"""Import paths from SuperGradients' documentation, and the Slipstream objects that they refer to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipstream import dataset
from slipstream.errors import did_you_mean

__all__ = ["MODULES", "TRANSFORMS", "missing_message"]

_OWN = "slipstream.supergradients"
_TRAINER = {"Trainer": f"{_OWN}.trainer:Trainer"}
_KD_TRAINER = {"KDTrainer": f"{_OWN}.trainer:KDTrainer"}
_ENUMS = {name: f"{_OWN}.object_names:{name}" for name in ("MultiGPUMode", "StrictLoad")}
_NAMES = {name: f"{_OWN}.object_names:{name}" for name in ("Losses", "Models")}
_SETUP = {
    name: f"{_OWN}.environment:{name}" for name in ("init_trainer", "is_distributed", "multi_process_safe")
}
_DEVICE = {"setup_device": f"{_OWN}.environment:setup_device"}
_KINDS = (
    "callback",
    "collate_function",
    "dataset",
    "loss",
    "lr_scheduler",
    "metric",
    "model",
    "optimizer",
    "sampler",
    "transform",
)
_REGISTERS = {f"register_{kind}": f"{_OWN}.registry:register_{kind}" for kind in _KINDS}
_METRICS = {
    "Accuracy": "slipstream.training.metrics:Accuracy",
    "Top5": "slipstream.training.metrics:Top5",
}
_SEG_METRICS = {
    name: f"slipstream.training.metrics:{name}"
    for name in ("BinaryDice", "BinaryIOU", "Dice", "IoU", "PixelAccuracy")
}
_CROSS_ENTROPY = {"CrossEntropyLoss": "slipstream.training.losses:CrossEntropyLoss"}
_ZOO = "slipstream.zoo"
_LOSSES = _CROSS_ENTROPY | {
    name: f"{_ZOO}:{name}"
    for name in ("BCEDiceLoss", "DiceCEEdgeLoss", "FocalLoss", "KDLogitsLoss", "STDCLoss", "ShelfNetOHEMLoss")
}
_LOSS_MODULES = {
    "bce_dice_loss": ("BCEDiceLoss",),
    "cwd_loss": ("ChannelWiseKnowledgeDistillationLoss",),
    "dice_ce_edge_loss": ("DiceCEEdgeLoss",),
    "focal_loss": ("FocalLoss",),
    "kd_losses": ("KDLogitsLoss", "KDklDivLoss"),
    "seg_kd_loss": ("SegKDLoss",),
    "shelfnet_ohem_loss": ("ShelfNetOHEMLoss",),
    "stdc_loss": ("STDCLoss",),
}
_CALLBACKS = {
    name: f"slipstream.training.callbacks:{name}"
    for name in (
        "Callback",
        "EarlyStop",
        "Phase",
        "PhaseCallback",
        "PhaseContext",
        "SlidingWindowValidationCallback",
    )
} | {
    "BinarySegmentationVisualizationCallback": (
        "slipstream.training.binary_visualization:BinarySegmentationVisualizationCallback"
    ),
    "LRCallbackBase": "slipstream.training.lr_callbacks:LRCallbackBase",
}
TRANSFORMS = sorted(name for name in dataset.__all__ if re.match("Seg[A-Z]", name))
"""Names of the segmentation transforms, which are the same in SuperGradients and Slipstream."""
_TRANSFORMS = {name: f"{_OWN}.transforms:{name}" for name in TRANSFORMS}
_CLASSIFICATION = {
    "Cifar10": "slipstream.dataset:CIFAR10",
    "Cifar100": "slipstream.dataset:CIFAR100",
    "ImageNetDataset": "slipstream.dataset:ImageNetDataset",
}
_SEGMENTATION = {
    name: f"slipstream.dataset:{name}"
    for name in (
        "CityscapesConcatDataset", "CityscapesDataset", "CoCoSegmentationDataSet", "SuperviselyPersonsDataset",
    )
}  # fmt: skip
_LOADERS = {
    "get": f"{_OWN}.dataloaders:get",
    "get_data_loader": f"{_OWN}.dataloaders:get",
    **{
        f"{name}_{split}": f"{_OWN}.dataloaders:{name}_{split}"
        for name in (
            "cifar10", "cifar100", "cityscapes", "cityscapes_ddrnet", "cityscapes_regseg48", "cityscapes_stdc_seg50",
            "cityscapes_stdc_seg75", "coco_segmentation", "imagenet", "imagenet_resnet50", "supervisely_persons",
        )
        for split in ("train", "val")
    },
}  # fmt: skip
_PREDICTIONS = {
    name: f"slipstream.zoo.predictions:{name}"
    for name in (
        "ClassificationPrediction", "ImageClassificationPrediction", "ImagePrediction", "ImageSegmentationPrediction",
        "ImagesPredictions", "SegmentationPrediction",
    )
}  # fmt: skip
_PROCESSING = {
    name: f"{_OWN}.processing:{name}"
    for name in (
        "CenterCrop", "ComposeProcessing", "ImagePermute", "NormalizeImage", "Resize", "SegmentationPadShortToCropSize",
        "SegmentationRescale", "StandardizeImage",
    )
}  # fmt: skip
_MODELS = {"get": f"{_OWN}.models:get", **_NAMES}

MODULES: Mapping[str, Mapping[str, str]] = {
    "super_gradients": {
        **_TRAINER,
        **_KD_TRAINER,
        **_SETUP,
        **_DEVICE,
        "__version__": f"{_OWN}.environment:SUPPORTED_VERSION",
    },
    "super_gradients.common": {**_SETUP, **_ENUMS},
    "super_gradients.common.abstractions": {},
    "super_gradients.common.abstractions.abstract_logger": {"get_logger": f"{_OWN}.environment:get_logger"},
    "super_gradients.common.data_types": _ENUMS,
    "super_gradients.common.data_types.enum": _ENUMS,
    "super_gradients.common.environment": {},
    "super_gradients.common.environment.cfg_utils": {"load_recipe": f"{_OWN}.hyperparams:load_recipe"},
    "super_gradients.common.environment.ddp_utils": _SETUP,
    "super_gradients.common.environment.env_helpers": _SETUP,
    "super_gradients.common.object_names": _NAMES,
    "super_gradients.common.registry": _REGISTERS,
    "super_gradients.common.registry.registry": _REGISTERS,
    "super_gradients.training": {**_TRAINER, **_KD_TRAINER, **_ENUMS},
    "super_gradients.training.dataloaders": _LOADERS,
    "super_gradients.training.dataloaders.dataloaders": _LOADERS,
    "super_gradients.training.datasets": {**_CLASSIFICATION, **_SEGMENTATION},
    "super_gradients.training.datasets.classification_datasets": _CLASSIFICATION,
    "super_gradients.training.datasets.segmentation_datasets": _SEGMENTATION,
    "super_gradients.training.kd_trainer": _KD_TRAINER,
    "super_gradients.training.kd_trainer.kd_trainer": _KD_TRAINER,
    "super_gradients.training.losses": _LOSSES,
    "super_gradients.training.losses.label_smoothing_cross_entropy_loss": _CROSS_ENTROPY,
    **{
        f"super_gradients.training.losses.{module}": {name: f"{_ZOO}:{name}" for name in names}
        for module, names in _LOSS_MODULES.items()
    },
    "super_gradients.training.metrics": {**_METRICS, **_SEG_METRICS},
    "super_gradients.training.metrics.classification_metrics": _METRICS,
    "super_gradients.training.metrics.segmentation_metrics": _SEG_METRICS,
    "super_gradients.training.models": _MODELS,
    "super_gradients.training.models.kd_modules": {},
    "super_gradients.training.models.kd_modules.kd_module": {
        "KDModule": "slipstream.training.kd_module:KDModule",
        "KDOutput": f"{_ZOO}:KDOutput",
    },
    "super_gradients.training.models.model_factory": {"get": f"{_OWN}.models:get"},
    "super_gradients.training.processing": _PROCESSING,
    "super_gradients.training.processing.processing": _PROCESSING,
    "super_gradients.training.sg_trainer": {**_TRAINER, "StrictLoad": _ENUMS["StrictLoad"]},
    "super_gradients.training.training_hyperparams": {"get": f"{_OWN}.hyperparams:get"},
    "super_gradients.training.transforms": _TRANSFORMS,
    "super_gradients.training.transforms.transforms": _TRANSFORMS,
    "super_gradients.training.utils": {},
    "super_gradients.training.utils.callbacks": _CALLBACKS,
    "super_gradients.training.utils.callbacks.base_callbacks": _CALLBACKS,
    "super_gradients.training.utils.callbacks.callbacks": _CALLBACKS,
    "super_gradients.training.utils.checkpoint_utils": {
        "load_checkpoint_to_model": f"{_OWN}.models:load_checkpoint_to_model"
    },
    "super_gradients.training.utils.early_stopping": {"EarlyStop": _CALLBACKS["EarlyStop"]},
    "super_gradients.training.utils.ema_decay_schedules": {
        name: f"slipstream.training.ema_decay:{name}" for name in ("EMA_DECAY_FUNCTIONS", "IDecayFunction")
    },
    "super_gradients.training.utils.kd_trainer_utils": {
        "NormalizationAdapter": f"{_ZOO}:NormalizationAdapter"
    },
    "super_gradients.training.utils.distributed_training_utils": {**_DEVICE, **_SETUP},
    "super_gradients.training.utils.predict": _PREDICTIONS,
}
"""Maps each SuperGradients module to its names, and each name to the Slipstream object that replaces it."""

_TOPICS = (
    (
        r"train_from_(kd_)?recipe|recipes",
        "use `slipstream train RECIPE`, or `python -m slipstream.train_from_recipe`",
    ),
    (r"kd|distill", "use KDTrainer, and pass student=... and teacher=... to its train method"),
    (
        r"detection|yolo|ssd|(?<!com)pose|keypoint|dekr|bbox|nms",
        "object detection and pose estimation are not supported; Slipstream supports only semantic segmentation and "
        "image classification",
    ),
    (r"quantiz|qat|ptq|calibrat", "quantization is not supported"),
    (
        r"export|conver|onnx|coreml",
        "export is not supported; use torch.export or torch.onnx.export with the network",
    ),
    (
        r"lr_?callback|lr_?scheduler|lr_?warmup",
        "subclass LRCallbackBase, set lr_mode='FunctionLRScheduler', or set lr_mode to a torch scheduler",
    ),
    (
        r"decay",
        "set ema_params.decay_type to 'constant', 'threshold' or 'exp', or subclass IDecayFunction",
    ),
    (r"sg_?logger", "set sg_logger by name ('wandb_sg_logger'), or use a hook from slipstream.hooks"),
    (
        r"adapters|data_?gradients",
        "pass a torch Dataset that returns (image, class ids) to dataloaders.get(dataset=...)",
    ),
    (
        r"factor(y|ies)|resolve_param",
        "pass transforms and other components as names or {Name: {arguments}}, as in recipes; register_loss and the "
        "other decorators are in super_gradients.common.registry",
    ),
    (
        r"(segmentation|directory|list|vision)_?data_?set",
        "write a torch Dataset that returns (image, class ids), or use slipstream.dataset.ImageMaskFolder",
    ),
    (
        r"register_dataloader",
        "pass your dataset to dataloaders.get(dataset=...), or its loader to Trainer.train",
    ),
    (
        r"training\.utils\.registry",
        "register_loss and the other decorators in docs/from_supergradients.md are in super_gradients.common.registry",
    ),
    (r"training\.params", "pass training_params to Trainer.train as a dict; docs/trainer.md lists its keys"),
    (
        r"processing",
        "pass a list of transforms to the network with set_dataset_processing_params(image_processor=[...])",
    ),
    (r"media", "a network's predict method accepts paths, Pillow images, arrays and tensors"),
    (r"checkpoints_dir", "use Trainer(...).checkpoints_dir_path; an experiment has a single folder"),
    (r"\bmodules\b", "use modules from torch.nn or timm, or networks from models.get"),
    (r"visual", "use `slipstream predict`, or slipstream.visualization"),
    (
        r"evaluate_|resume_experiment",
        "use `slipstream val`, or Trainer.evaluate_from_recipe and Trainer.resume_experiment",
    ),
)


def missing_message(fullname: str) -> str:
    """Return an error message that explains why a SuperGradients name is not available, and what to use instead."""
    parent, _, name = fullname.rpartition(".")
    modules = [module for module, names in MODULES.items() if name in names]
    if modules:
        return f"cannot import {fullname}: '{name}' is in {modules[0]}"
    reason = next((text for pattern, text in _TOPICS if re.search(pattern, fullname, re.IGNORECASE)), "")
    children = [module.rpartition(".")[2] for module in MODULES if module.startswith(f"{parent}.")]
    hint = "" if reason else did_you_mean(name, [*MODULES.get(parent, ()), *children])
    reason = reason or "docs/from_supergradients.md lists the paths that can be imported"
    return f"Slipstream's replacement for SuperGradients does not provide {fullname}{hint}; {reason}"
