"""Write a folder of recipes with the layout and keys of SuperGradients' recipes, but with small crops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from predecessor_data import SIDE

IGNORED = 19
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_EMPTY = {"_target_": "super_gradients.training.utils.utils.empty_list"}
_STRICT = {"_target_": "super_gradients.training.sg_trainer.StrictLoad", "value": "no_key_matching"}
_SEG_METRICS = [
    {"PixelAccuracy": {"ignore_label": IGNORED}},
    {"IoU": {"num_classes": 20, "ignore_index": IGNORED}},
]
_DEFAULT_TRAIN = dict(
    resume=False, run_id=None, resume_path=None, ckpt_name="ckpt_latest.pth", lr_mode=None, lr_warmup_epochs=0,
    lr_warmup_steps=0, lr_cooldown_epochs=0, warmup_initial_lr=None, step_lr_update_freq=None,
    cosine_final_lr_ratio=0.01, warmup_mode="LinearEpochLRWarmup", lr_updates=_EMPTY, optimizer="SGD",
    optimizer_params={}, load_opt_params=True, zero_weight_decay_on_bias_and_bn=False, loss=None, criterion_params={},
    ema=False, ema_params=dict(decay=0.9999, decay_type="exp", beta=15), train_metrics_list=[], valid_metrics_list=[],
    metric_to_watch="Accuracy", greater_metric_to_watch_is_better=True, precise_bn=False, sync_bn=False,
    silent_mode=False, mixed_precision=False, save_ckpt_epoch_list=[], average_best_models=True, batch_accumulate=1,
    run_validation_freq=1, save_model=True, seed=42, phase_callbacks=[], clip_grad_norm=None, max_train_batches=None,
    sg_logger="base_sg_logger", sg_logger_params=dict(monitor_system=True, launch_tensorboard=False),
    torch_compile=False, torch_compile_options=dict(mode="reduce-overhead", fullgraph=False, disable=False),
    finetune=False, _convert_="all",
)  # fmt: skip
_CITYSCAPES_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=800, lr_mode="PolyLRScheduler", initial_lr=0.01, lr_warmup_epochs=10,
    multiply_head_lr=10.0, optimizer="SGD", optimizer_params=dict(momentum=0.9, weight_decay=5e-4), ema=True,
    train_metrics_list=_SEG_METRICS, valid_metrics_list=_SEG_METRICS, zero_weight_decay_on_bias_and_bn=True,
    metric_to_watch="IoU", _convert_="all",
)  # fmt: skip
_CLASSIFIER = dict(train_metrics_list=["Accuracy", "Top5"], valid_metrics_list=["Accuracy", "Top5"])
_CIFAR_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=250, lr_decay_factor=0.1, lr_mode="StepLRScheduler", initial_lr=0.1,
    lr_updates={"_target_": "numpy.arange", "start": 100, "stop": 250, "step": 50}, loss="CrossEntropyLoss",
    optimizer_params=dict(weight_decay=1e-4, momentum=0.9), metric_to_watch="Accuracy", **_CLASSIFIER,
)  # fmt: skip
_RESNET_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=400, initial_lr=0.1, lr_mode="CosineLRScheduler", lr_warmup_epochs=5,
    save_ckpt_epoch_list=[50, 100], mixed_precision=True, zero_weight_decay_on_bias_and_bn=True,
    loss="CrossEntropyLoss", metric_to_watch="Accuracy", **_CLASSIFIER,
)  # fmt: skip
_RESNET_KD_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=610, initial_lr=5e-3, lr_mode="CosineLRScheduler", lr_warmup_epochs=5,
    lr_cooldown_epochs=10, ema=True, mixed_precision=True, zero_weight_decay_on_bias_and_bn=True, optimizer="Lamb",
    optimizer_params=dict(weight_decay=0.02), loss="CrossEntropyLoss", **_CLASSIFIER,
)  # fmt: skip
_UNET_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=100, lr_mode="CosineLRScheduler", cosine_final_lr_ratio=0.01,
    initial_lr=0.1, lr_warmup_epochs=0, multiply_head_lr=1.0, optimizer="SGD",
    optimizer_params=dict(momentum=0.9, weight_decay=5e-4), ema=True,
    ema_params=dict(decay=0.999, decay_type="exp", beta=15), train_metrics_list=["BinaryIOU"],
    valid_metrics_list=["BinaryIOU"], zero_weight_decay_on_bias_and_bn=True, metric_to_watch="target_IOU",
)  # fmt: skip
_COCO_METRICS: list[Any] = ["PixelAccuracy", {"IoU": {"num_classes": 21}}]
_SHELFNET_TRAIN = dict(
    defaults=["default_train_params"], max_epochs=150, initial_lr=5e-3, loss="ShelfNetOHEMLoss", optimizer="SGD",
    mixed_precision=True, batch_accumulate=3, lr_mode="PolyLRScheduler", load_opt_params=False,
    optimizer_params=dict(momentum=0.9, weight_decay=1e-4, nesterov=False), train_metrics_list=_COCO_METRICS,
    valid_metrics_list=_COCO_METRICS, metric_to_watch="IoU",
)  # fmt: skip
_CHECKPOINT = dict(
    load_checkpoint=False, load_backbone=False, checkpoint_path=None, external_checkpoint_path=None,
    source_ckpt_folder_name=None, strict_load=_STRICT, pretrained_weights=None, checkpoint_num_classes=None,
)  # fmt: skip
_SETUP = dict(
    **dict.fromkeys(
        ["lr", "batch_size", "val_batch_size", "ema", "epochs", "resume", "num_workers", "ckpt_root_dir"]
    ),
    hydra=dict(
        callbacks=dict(
            shortcuts_cb={
                "_target_": "super_gradients.common.environment.omegaconf_utils.RecipeShortcutsCallback"
            }
        ),
        run=dict(dir="${hydra_output_dir:${ckpt_root_dir}, ${experiment_name}}"),
    ),
)


def _finals() -> list[Any]:
    return [
        {"SegStandardize": {"max_value": 255}},
        {"SegNormalize": {"mean": _MEAN, "std": _STD}},
        {"SegConvertToTensor": {"mask_output_dtype": "long"}},
    ]


def _augmented(crop: Any, scales: list[float], jitter: float = 0.5, **padding: Any) -> list[Any]:
    return [
        {"SegColorJitter": dict(brightness=jitter, contrast=jitter, saturation=jitter)},
        {"SegRandomFlip": {"prob": 0.5}},
        {"SegRandomRescale": {"scales": scales}},
        {"SegPadShortToCropSize": {"crop_size": crop, "fill_mask": IGNORED, **padding}},
        {"SegCropImageAndMask": {"crop_size": crop, "mode": "random"}},
        *_finals(),
    ]


def _cityscapes(lists: dict[str, Any] | None = None, **loader: Any) -> dict[str, Any]:
    common = dict(root_dir="/data/cityscapes", labels_csv_path="lists/labels.csv", cache_labels=False)
    common |= dict(cache_images=False, transforms=_finals())
    return dict(
        train_dataset_params=common | (lists or dict(list_file="lists/train.lst")),
        val_dataset_params=common | dict(list_file="lists/val.lst"),
        train_dataloader_params=dict(shuffle=True, batch_size=8, num_workers=8, drop_last=True, **loader),
        val_dataloader_params=dict(batch_size=8, num_workers=8, drop_last=False),
    )


def _variant(train: list[Any], val: list[Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        defaults=["cityscapes_dataset_params", "_self_"], train_dataset_params=dict(transforms=train)
    )
    if val is not None:
        found["val_dataset_params"] = dict(transforms=val + _finals())
    return found | dict(train_dataloader_params=dict(batch_size=2), val_dataloader_params=dict(batch_size=2))


def _imagenet(sampler: dict[str, Any] | None = None) -> dict[str, Any]:
    end: list[Any] = [
        "ToTensor",
        {"Normalize": {"mean": "${dataset_params.img_mean}", "std": "${dataset_params.img_std}"}},
    ]
    crop = {"RandomResizedCropAndInterpolation": dict(size=SIDE, interpolation="random")}
    augment = {"RandAugmentTransform": dict(config_str="rand-m7-mstd0.5", crop_size=SIDE, img_mean=_MEAN)}
    mixup = "super_gradients.training.datasets.mixup.CollateMixup"
    return dict(
        img_mean=_MEAN,
        img_std=_STD,
        train_dataset_params=dict(
            root="/data/Imagenet/train", transforms=[crop, "RandomHorizontalFlip", augment, *end]
        ),
        val_dataset_params=dict(
            root="/data/Imagenet/val", transforms=[{"Resize": {"size": 72}}, {"CenterCrop": {"size": SIDE}}, *end]
        ),
        train_dataloader_params=dict(
            batch_size=4, shuffle=True, num_workers=8, drop_last=False, pin_memory=True, sampler=sampler,
            collate_fn=dict(_target_=mixup, mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1),
        ),
        val_dataloader_params=dict(batch_size=4, num_workers=8, drop_last=False, pin_memory=True),
        _convert_="all",
    )  # fmt: skip


def _cifar() -> dict[str, Any]:
    end: list[Any] = [
        "ToTensor",
        {"Normalize": {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.201]}},
    ]
    train = [{"RandomCrop": {"size": 32, "padding": 4}}, "RandomHorizontalFlip", *end]
    common = dict(root="./data/cifar10", target_transform=None, download=False)
    loader = dict(batch_size=4, num_workers=8, drop_last=False, pin_memory=True)
    return dict(
        batch_size=256,
        val_batch_size=512,
        train_dataset_params=common | dict(train=True, transforms=train),
        val_dataset_params=common | dict(train=False, transforms=[{"Resize": {"size": 32}}, *end]),
        train_dataloader_params=loader | dict(shuffle=True),
        val_dataloader_params=loader,
    )


def _supervisely() -> dict[str, Any]:
    common = dict(root_dir="${..dataset_dir}", cache_labels=False, cache_images=False)
    scale, color, flip, pad, crop, *end = _augmented([SIDE, SIDE + 32], [0.25, 1.0])
    pad["SegPadShortToCropSize"]["fill_mask"] = 0
    loader = dict(dataset="SuperviselyPersonsDataset", batch_size="${..batch_size}")
    return dict(
        dataset_dir="/data/supervisely-persons",
        batch_size=2,
        train_dataset_params=common
        | dict(list_file="train.csv", transforms=[color, scale, flip, pad, crop, *end]),
        val_dataset_params=common
        | dict(list_file="val.csv", transforms=[{"SegResize": dict(h=SIDE + 32, w=SIDE)}, *_finals()]),
        train_dataloader_params=loader | dict(shuffle=True, drop_last=True),
        val_dataloader_params=loader | dict(drop_last=False),
        _convert_="all",
    )


def _coco() -> dict[str, Any]:
    classes = "super_gradients.training.utils.segmentation_utils.coco_sub_classes_inclusion_tuples_list"
    common = dict(
        root_dir="/data/coco/", targets_sub_directory="annotations", cache_labels=False, cache_images=False,
        dataset_classes_inclusion_tuples_list={"_target_": classes},
    )  # fmt: skip
    augment = [
        {"SegRandomFlip": {"prob": 0.5}},
        {"SegRescale": {"long_size": SIDE + 12}},
        {"SegRandomRescale": {"scales": [0.5, 2.0]}},
        {"SegPadShortToCropSize": {"crop_size": SIDE}},
        {"SegCropImageAndMask": {"crop_size": SIDE, "mode": "random"}},
    ]
    center = [
        {"SegRescale": {"short_size": SIDE}},
        {"SegCropImageAndMask": {"crop_size": SIDE, "mode": "center"}},
    ]
    splits = {
        f"{split}_dataset_params": common
        | dict(list_file=f"instances_{split}2017.json", samples_sub_directory=f"images/{split}2017")
        | dict(transforms=transforms + _finals())
        for split, transforms in (("train", augment), ("val", center))
    }
    return splits | dict(
        train_dataloader_params=dict(shuffle=True, batch_size=2, num_workers=8, drop_last=True),
        val_dataloader_params=dict(batch_size=2, num_workers=8, drop_last=False),
    )


def _groups() -> dict[str, dict[str, Any]]:
    square, half = [SIDE, SIDE], {"SegRescale": {"scale_factor": 0.5}}
    three_quarters = [{"SegRescale": {"scale_factor": 0.75}}]
    long_side = [
        {"SegRescale": {"long_size": SIDE}},
        {"SegPadShortToCropSize": {"crop_size": square, "fill_mask": IGNORED}},
    ]
    al_lists = dict(list_files=["lists/train.lst", "lists/auto_labelling.lst"])
    al = _cityscapes(al_lists, dataset="CityscapesConcatDataset")
    al["val_dataloader_params"]["dataset"] = "CityscapesDataset"
    data = {
        "cityscapes": _cityscapes(),
        "cityscapes_al": al,
        "cityscapes_ddrnet": _variant(_augmented(square, [0.5, 2.0])),
        "cityscapes_ppliteseg_seg75": _variant(_augmented(square, [0.25, 1.75]), three_quarters),
        "cityscapes_regseg48": _variant(_augmented(SIDE, [0.4, 1.6], 0.1, fill_image=[19, 0, 0])),
        "cityscapes_segformer": _variant(_augmented(square, [0.5, 2.0]), long_side),
        "cityscapes_stdc_seg50": _variant(_augmented([2 * SIDE, SIDE], [0.125, 1.5]), [half]),
        "cityscapes_stdc_seg75": _variant(_augmented([2 * SIDE, SIDE], [0.125, 1.5]), three_quarters),
        "imagenet_resnet50": _imagenet(),
        "imagenet_resnet50_kd": _imagenet({"RepeatAugSampler": {"num_repeats": 3}}),
        "cifar10": _cifar(),
        "supervisely_persons": _supervisely(),
        "coco_segmentation": _coco(),
    }
    train = {
        "default": _DEFAULT_TRAIN,
        "cityscapes_default": _CITYSCAPES_TRAIN,
        "cifar10_resnet": _CIFAR_TRAIN,
        "imagenet_resnet50": _RESNET_TRAIN,
        "imagenet_resnet50_kd": _RESNET_KD_TRAIN,
        "supervisely_default": _UNET_TRAIN,
        "coco_segmentation_shelfnet_lw": _SHELFNET_TRAIN,
    }
    return {
        **{f"dataset_params/{name}_dataset_params": values for name, values in data.items()},
        **{f"training_hyperparams/{name}_train_params": values for name, values in train.items()},
        "checkpoint_params/default_checkpoint_params": _CHECKPOINT,
        "arch_params/resnet18_cifar_arch_params": dict(num_classes=10),
        "arch_params/resnet50_arch_params": dict(num_classes=1000),
        "arch_params/shelfnet34_lw_arch_params": dict(num_classes=21, image_size=512),
        "variable_setup": _SETUP,
    }


def _recipe(train: str, data: str, extra: list[Any] | None = None, **keys: Any) -> dict[str, Any]:
    defaults = [
        {"training_hyperparams": f"{train}_train_params"},
        {"dataset_params": f"{data}_dataset_params"},
        *(extra or []),
        {"checkpoint_params": "default_checkpoint_params"},
        "_self_",
        "variable_setup",
    ]
    names = dict(train_dataloader="cityscapes_train", val_dataloader="cityscapes_val")
    shared = dict(experiment_name="${architecture}_cityscapes", multi_gpu="DDP", num_gpus=4)
    return dict(defaults=defaults) | names | shared | keys


def _head(aux: int, detail: int, weights: list[float], kernel: int = 5) -> dict[str, Any]:
    heads = dict(num_aux_heads=aux, num_detail_heads=detail, weights=weights)
    loss = dict(num_classes=19, ignore_index=IGNORED, dice_ce_weights=[1.0, 1.0], ce_edge_weights=[0.5, 0.5])
    return {"DiceCEEdgeLoss": loss | heads | dict(edge_kernel=kernel)}


def _backbone(**keys: Any) -> dict[str, Any]:
    return dict(checkpoint_path=None, load_backbone=True, strict_load="no_key_matching") | keys


def _segmentation() -> dict[str, dict[str, Any]]:
    with_aux, weights_only = dict(num_classes=19, use_aux_heads=True), dict(load_weights_only=True)
    slow = dict.fromkeys(
        ["_backbone", "compression3", "compression4", "down3", "down4", "layer3_skip"], 0.0075
    )
    pp = dict(
        sync_bn=True, initial_lr={"encoder.backbone": 0.01, "default": 0.1}, loss=_head(3, 0, [1.0] * 4)
    )
    stdc = dict(architecture="stdc1_seg", arch_params=with_aux, checkpoint_params=_backbone(**weights_only))
    ohem = dict(num_classes=19, ignore_index=IGNORED, mining_percent=0.0625, weights=[1.0, 0.6, 0.4, 1.0])
    ddrnet = dict(arch_params=with_aux, load_checkpoint=False)
    al = _recipe("cityscapes_default", "cityscapes_al", architecture="ddrnet_39", **ddrnet)
    del al["train_dataloader"], al["val_dataloader"]
    al |= dict(
        dataset_params=dict(
            train_dataset_params=dict(transforms=_augmented([SIDE, SIDE], [0.5, 2.0])),
            train_dataloader_params=dict(batch_size=2),
        ),
        checkpoint_params=_backbone(checkpoint_path="???"),
        training_hyperparams=dict(initial_lr=0.0075, loss=_head(1, 0, [1.0, 0.4]), sync_bn=True),
    )
    regseg = dict(
        sync_bn=True, resume="${resume}", max_epochs=800, lr_mode="PolyLRScheduler", initial_lr=0.02, optimizer="SGD",
        optimizer_params=dict(momentum=0.9, weight_decay=5e-4), ema=True, loss="CrossEntropyLoss",
        criterion_params=dict(ignore_index="${cityscapes_ignored_label}"), train_metrics_list=_SEG_METRICS,
        valid_metrics_list=_SEG_METRICS, metric_to_watch="IoU",
    )  # fmt: skip
    return {
        "cityscapes_ddrnet": _recipe(
            "cityscapes_default", "cityscapes_ddrnet", architecture="ddrnet_23", checkpoint_params=_backbone(),
            training_hyperparams=dict(initial_lr=slow | {"default": 0.075}, loss=_head(1, 0, [1, 0.4]), sync_bn=True),
            **ddrnet,
        ),
        "cityscapes_al_ddrnet": al,
        "cityscapes_pplite_seg50": _recipe(
            "cityscapes_default", "cityscapes_stdc_seg50", architecture="pp_lite_t_seg", arch_params=with_aux,
            training_hyperparams=pp, experiment_name="${architecture}50_cityscapes",
        ),
        "cityscapes_pplite_seg75": _recipe(
            "cityscapes_default", "cityscapes_ppliteseg_seg75", architecture="pp_lite_t_seg", arch_params=with_aux,
            training_hyperparams=pp, checkpoint_params=_backbone(**weights_only),
        ),
        "cityscapes_stdc_base": _recipe(
            "cityscapes_default", "cityscapes", data_loader_num_workers=10,
            training_hyperparams=dict(sync_bn=True), **stdc,
        ),
        "cityscapes_stdc_seg50": _recipe(
            "cityscapes_default", "cityscapes_stdc_seg50", **stdc,
            training_hyperparams=dict(
                initial_lr=dict(cp=0.01, default=0.1), sync_bn=True, loss=_head(2, 1, [1.0, 0.6, 0.4, 1.0], 3)
            ),
        ),
        "cityscapes_stdc_seg75": _recipe(
            "cityscapes_default", "cityscapes_stdc_seg75", **stdc,
            training_hyperparams=dict(initial_lr=dict(cp=0.005, default=0.05), sync_bn=True, loss={"STDCLoss": ohem}),
        ),
        "cityscapes_regseg48": _recipe(
            "default", "cityscapes_regseg48", architecture="regseg48", cityscapes_ignored_label=IGNORED, resume=False,
            arch_params=dict(num_classes=19, strict_load="no_key_matching"), project_name="RegSeg", multi_gpu="AUTO",
            training_hyperparams=regseg | {"_convert_": "all"},
        ),
    }  # fmt: skip


def _distillation() -> dict[str, dict[str, Any]]:
    losses = "super_gradients.training.losses"
    kd = dict(architecture="kd_module", run_teacher_on_eval=True, resume=False)
    one_hot = dict(_target_=f"{losses}.label_smoothing_cross_entropy_loss.CrossEntropyLoss")
    adapter = dict(
        _target_="super_gradients.training.utils.kd_trainer_utils.NormalizationAdapter", mean_original=_MEAN,
        std_original=_STD, mean_required=[0.5] * 3, std_required=[0.5] * 3,
    )  # fmt: skip
    maps = dict(_target_=f"{losses}.cwd_loss.ChannelWiseKnowledgeDistillationLoss", temperature=3.0)
    pixels = dict(
        _target_=f"{losses}.seg_kd_loss.SegKDLoss", weights=[1.0], kd_loss_weights=[1.0, 6.0],
        kd_loss=maps | dict(normalization_mode="channel_wise"),
        ce_loss=dict(_target_="torch.nn.CrossEntropyLoss", ignore_index=IGNORED),
    )  # fmt: skip
    options, weights = dict(num_classes=19, use_aux_heads=False), dict(strict_load=_STRICT)
    return {
        "cityscapes_kd_base": _recipe(
            "cityscapes_default", "cityscapes_ddrnet", **kd, student_architecture="???", student_arch_params=options,
            teacher_architecture="ddrnet_39", teacher_arch_params=options, arch_params=None,
            teacher_checkpoint_params=weights | dict(checkpoint_path=None, pretrained_weights="cityscapes"),
            student_checkpoint_params=weights | dict(load_backbone=True, checkpoint_path="???"),
            experiment_name="${student_architecture}_teacher-${teacher_architecture}",
            training_hyperparams=dict(
                sync_bn=True, max_epochs=500, initial_lr=dict(_backbone=0.0075, default=0.075), loss=pixels,
                resume="${resume}",
            ),
        ),
        "imagenet_resnet50_kd": _recipe(
            "imagenet_resnet50_kd", "imagenet_resnet50_kd", **kd, experiment_name="resnet50_imagenet_KD_Model",
            train_dataloader="imagenet_train", val_dataloader="imagenet_val", student_architecture="resnet50",
            student_arch_params=dict(num_classes=1000), teacher_architecture="beit_base_patch16_224",
            teacher_arch_params=dict(num_classes=1000, image_size=[224, 224], patch_size=[16, 16]),
            arch_params=dict(teacher_input_adapter=adapter),
            checkpoint_params=dict(teacher_pretrained_weights="imagenet"),
            teacher_checkpoint_params=weights | dict(checkpoint_path=None, pretrained_weights="imagenet"),
            student_checkpoint_params=weights | dict(checkpoint_path=None, pretrained_weights=None),
            training_hyperparams=dict(
                resume="${resume}", loss="KDLogitsLoss",
                criterion_params=dict(distillation_loss_coeff=0.8, task_loss_fn=one_hot),
            ),
        ),
    }  # fmt: skip


def _others() -> dict[str, dict[str, Any]]:
    segformer = _recipe(
        "default", "cityscapes_segformer", data_root_dir="/data/cityscapes", arch_params=dict(num_classes=19),
        dataset_params={f"{split}_dataset_params": dict(root_dir="${data_root_dir}") for split in ("train", "val")},
        checkpoint_params=_backbone(load_weights_only=True), load_checkpoint=False, resume=False,
        cityscapes_ignored_label=IGNORED,
        training_hyperparams=dict(
            resume="${resume}", optimizer="AdamW", zero_weight_decay_on_bias_and_bn=True, sync_bn=True,
            loss="CrossEntropyLoss", criterion_params=dict(ignore_index="${cityscapes_ignored_label}"),
            phase_callbacks=[
                {
                    "SlidingWindowValidationCallback": dict(
                        transforms_for_sliding_window=[], crop_size=[SIDE, SIDE], stride=[SIDE, SIDE]
                    )
                }
            ],
            train_metrics_list=_SEG_METRICS[1:], valid_metrics_list=_SEG_METRICS[1:], metric_to_watch="IoU",
        ),
    )  # fmt: skip
    rates = dict(max_epochs=2, lr_mode="PolyLRScheduler", initial_lr=0.00006)
    sizes = {
        f"cityscapes_segformer_b{size}": dict(
            defaults=["cityscapes_segformer", "_self_"], architecture=f"segformer_b{size}",
            training_hyperparams=rates | (dict(mixed_precision=True) if size == 5 else {}), multi_gpu="DDP", num_gpus=4,
        )
        for size in range(6)
    }  # fmt: skip
    unet = _recipe(
        "supervisely_default", "supervisely_persons", architecture="unet", multi_gpu="OFF",
        arch_params=dict(num_classes=1, use_aux_heads=False), dataset_params=dict(batch_size=2),
        training_hyperparams=dict(
            initial_lr=0.025, loss={"BCEDiceLoss": dict(loss_weights=[1.0, 1.0], logits=True)}
        ),
    )  # fmt: skip
    del unet["train_dataloader"], unet["val_dataloader"]
    return {
        "cityscapes_segformer": segformer,
        **sizes,
        "imagenet_resnet50": _recipe(
            "imagenet_resnet50", "imagenet_resnet50", [{"arch_params": "resnet50_arch_params"}],
            arch_params=dict(droppath_prob=0.05), architecture="resnet50", resume=False,
            train_dataloader="imagenet_train", val_dataloader="imagenet_val", experiment_name="resnet50_imagenet",
        ),
        "cifar10_resnet": _recipe(
            "cifar10_resnet", "cifar10", [{"arch_params": "resnet18_cifar_arch_params"}],
            train_dataloader="cifar10_train", val_dataloader="cifar10_val", architecture="resnet18_cifar",
            multi_gpu="Off", num_gpus=1,
        ),
        "coco_segmentation_shelfnet_lw": _recipe(
            "coco_segmentation_shelfnet_lw", "coco_segmentation", [{"arch_params": "shelfnet34_lw_arch_params"}],
            train_dataloader="coco_segmentation_train", val_dataloader="coco_segmentation_val", resume=False,
            checkpoint_params=dict(strict_load=True, load_backbone=False, checkpoint_path=None),
            training_hyperparams=dict(resume="${resume}"), architecture="shelfnet34_lw",
        ),
        "supervisely_unet": unet,
    }  # fmt: skip


def recipe_texts() -> dict[str, str]:
    """Return the text of each recipe file by its path in the folder."""
    files = _groups() | _segmentation() | _distillation() | _others()
    return {f"{name}.yaml": yaml.safe_dump(values, sort_keys=False) for name, values in files.items()}


def write_recipes(folder: Path) -> Path:
    """Write the recipe files to `folder`, and return `folder`."""
    for name, text in recipe_texts().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
