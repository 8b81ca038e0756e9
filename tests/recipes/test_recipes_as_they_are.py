"""Test that SuperGradients' recipe files work unchanged, and that unsupported ones raise an error with the reason."""

import pytest
import torch
from predecessor_data import CLASSES, write_data
from predecessor_folder import write_recipes

from slipstream.recipes import compose
from slipstream.runner import Runner
from slipstream.speed import SpeedPlan
from slipstream.training.recipe import recipe_config
from slipstream.zoo import models

pytest.importorskip("hydra")

TRAINED = {
    "cifar10_resnet": "cifar10",
    "cityscapes_al_ddrnet": "cityscapes",
    "cityscapes_ddrnet": "cityscapes",
    "cityscapes_kd_base": "cityscapes",
    "cityscapes_pplite_seg50": "cityscapes",
    "cityscapes_pplite_seg75": "cityscapes",
    "cityscapes_regseg48": "cityscapes",
    "cityscapes_stdc_seg50": "cityscapes",
    "cityscapes_stdc_seg75": "cityscapes",
    "coco_segmentation_shelfnet_lw": "coco",
    "imagenet_resnet50": "imagenet",
    "imagenet_resnet50_kd": "imagenet",
    "supervisely_unet": "supervisely",
    **{f"cityscapes_segformer_b{size}": "cityscapes" for size in range(6)},
}
FAST = ("cifar10_resnet", "cityscapes_pplite_seg75", "cityscapes_regseg48")
EXHAUSTIVE = {  # variants of networks that other recipes also train
    "cityscapes_ddrnet",
    "cityscapes_pplite_seg50",
    "cityscapes_stdc_seg75",
    *(f"cityscapes_segformer_b{size}" for size in range(1, 6)),
}
METRICS = {"cifar10": "Accuracy", "imagenet": "Accuracy", "supervisely": "target_IOU"}
OWN = {
    "cityscapes_al_ddrnet": ["checkpoint_params.checkpoint_path=null"],  # `???` in the recipe
    "cityscapes_kd_base": [
        "student_architecture=ddrnet_23_slim",
        "student_checkpoint_params.checkpoint_path=null",
    ],
    "coco_segmentation_shelfnet_lw": ["training_hyperparams.batch_accumulate=1"],  # 2 batches per epoch
    "imagenet_resnet50": [
        f"arch_params.num_classes={CLASSES}",
        f"dataset_params.train_dataloader_params.collate_fn.num_classes={CLASSES}",
    ],
    "imagenet_resnet50_kd": [
        f"student_arch_params.num_classes={CLASSES}",
        f"teacher_arch_params.num_classes={CLASSES}",
        f"dataset_params.train_dataloader_params.collate_fn.num_classes={CLASSES}",
        "+dataset_params.train_dataloader_params.sampler.RepeatAugSampler.selected_round=0",  # only 12 images
        "student_architecture=resnet18",
        "teacher_architecture=resnet34",
        "~teacher_arch_params.image_size",
        "~teacher_arch_params.patch_size",
    ],
}
TEACHERS = {
    "cityscapes_kd_base": ("ddrnet_39", {"num_classes": 19, "use_aux_heads": False}),
    "imagenet_resnet50_kd": ("resnet34", {"num_classes": CLASSES}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("predecessor")
    return write_recipes(root / "recipes"), write_data(root / "data")


def _marks(name):
    return () if name in FAST else pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in TRAINED])
def test_a_recipe_has_a_valid_plan_and_trains_two_steps(folders, tmp_path, monkeypatch, name):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    recipes, data = folders
    teacher = []
    if name in TEACHERS:
        if name == "imagenet_resnet50_kd":
            pytest.importorskip("pytorch_optimizer")  # for Lamb
        network, options = TEACHERS[name]
        torch.save({"net": models.get(network, **options).state_dict()}, tmp_path / "teacher.pth")
        teacher = [f"teacher_checkpoint_params.checkpoint_path={tmp_path / 'teacher.pth'}"]
    overrides = [
        f"data_root_dir={data / TRAINED[name]}",
        f"ckpt_root_dir={tmp_path}",
        "num_workers=0",
        "epochs=1",
        "training_hyperparams.max_train_batches=2",
        "training_hyperparams.max_valid_batches=1",
        "training_hyperparams.lr_warmup_epochs=0",
        *OWN.get(name, []),
        *teacher,
    ]
    cfg = recipe_config(compose(name, overrides, recipes))
    runner = Runner.from_cfg(cfg)
    before = [parameter.detach().clone() for parameter in runner.model.parameters()]
    runner.train()
    assert runner.iter == 2
    options = SpeedPlan.read(training_params=cfg["training_params"])
    assert (options.ema is not None) is bool(cfg["training_params"].get("ema"))
    changed = [not p.equal(q) for p, q in zip(runner.model.parameters(), before, strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    metric = METRICS.get(TRAINED[name], "IoU")
    assert 0 <= runner.message_hub.log_scalars[f"val/{metric}"].current() <= 1


def test_data_root_dir_replaces_the_common_folder_of_hard_coded_roots(folders):
    recipes, _ = folders
    data = compose("cityscapes_ddrnet", ["data_root_dir=/mine"], recipes)["dataset_params"]
    assert [data[f"{split}_dataset_params"]["root_dir"] for split in ("train", "val")] == ["/mine", "/mine"]
    data = compose("imagenet_resnet50", ["data_root_dir=/mine"], recipes)["dataset_params"]
    assert [data[f"{split}_dataset_params"]["root"] for split in ("train", "val")] == [
        "/mine/train",
        "/mine/val",
    ]
    own = ["data_root_dir=/mine", "dataset_params.val_dataset_params.root_dir=/other"]
    data = compose("cityscapes_ddrnet", own, recipes)["dataset_params"]
    assert [data[f"{split}_dataset_params"]["root_dir"] for split in ("train", "val")] == ["/mine", "/other"]
    assert compose("cityscapes_ddrnet", (), recipes)["dataset_params"]["train_dataset_params"][
        "root_dir"
    ] == ("/data/cityscapes")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("{_target_: numpy.arange, start: 100, stop: 250, step: 50}", [100, 150, 200]),
        ("{_target_: numpy.arange, _args_: [3]}", [0, 1, 2]),
        ("{_target_: numpy.linspace, start: 0, stop: 1, num: 3}", [0.0, 0.5, 1.0]),
        ("{_target_: super_gradients.training.utils.utils.empty_list}", []),
    ],
)
def test_ranges_are_computed_without_importing_their_targets(tmp_path, target, expected):
    (tmp_path / "mine.yaml").write_text(f"training_hyperparams: {{lr_updates: {target}}}\n")
    assert compose("mine", (), tmp_path)["training_hyperparams"]["lr_updates"] == expected
