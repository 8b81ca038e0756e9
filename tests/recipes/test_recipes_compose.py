"""Tests of recipe composition: hyperparameters, overrides, resolvers and one-line error messages."""

import subprocess
import sys

import pytest
from predecessor_folder import RECIPES

from slipstream.recipes import compose

hydra = pytest.importorskip("hydra.core.global_hydra")
OmegaConf = pytest.importorskip("omegaconf").OmegaConf

CITYSCAPES = {
    # Columns: architecture, jitter, rescale, crop, first validation transform, batch sizes, epochs, learning rate,
    # warm-up, optimizer, no weight decay for biases and norms, EMA.
    "cityscapes_pplite_seg75": (
        "pp_lite_t_seg", 0.5, [0.25, 1.75], [768, 768], {"SegRescale": {"scale_factor": 0.75}}, (8, 4), 800,
        {"encoder.backbone": 0.01, "default": 0.1}, 10, "SGD", True, True,
    ),
    "cityscapes_stdc_seg75": (
        "stdc1_seg", 0.5, [0.125, 1.5], [1536, 768], {"SegRescale": {"scale_factor": 0.75}}, (4, 4), 800,
        {"cp": 0.005, "default": 0.05}, 10, "SGD", True, True,
    ),
    "cityscapes_ddrnet": (
        "ddrnet_23", 0.5, [0.5, 2], [1024, 1024], None, (6, 6), 500,
        {
            **dict.fromkeys(
                ["_backbone", "compression3", "compression4", "down3", "down4", "layer3_skip", "layer4_skip",
                 "layer5_skip"], 0.0075,
            ),
            "default": 0.075,
        }, 10, "SGD", True, True,
    ),
    "cityscapes_regseg48": (
        "regseg48", 0.1, [0.4, 1.6], [1024, 1024], None, (4, 4), 800, 0.02, 0, "SGD", False, True,
    ),
    "cityscapes_segformer": (
        "segformer_b0", 0.5, [0.5, 2], [1024, 1024], {"SegRescale": {"long_size": 1024}}, (2, 2),
        160000 * 8 // 2975, 6e-5, 0, "AdamW", True, False,
    ),
}  # fmt: skip


def only(transforms, name):
    (found,) = [t[name] for t in transforms if isinstance(t, dict) and name in t]
    return found


@pytest.mark.parametrize("name", CITYSCAPES)
def test_recipes_have_the_published_hyperparameters(name):
    (architecture, jitter, scales, crop, first, batches, epochs, lr, warmup, optimizer, zero, ema) = (
        CITYSCAPES[name]
    )
    recipe = compose(name)
    data, params = recipe["dataset_params"], recipe["training_hyperparams"]
    train = data["train_dataset_params"]["transforms"]
    assert recipe["architecture"] == architecture
    assert [next(iter(t)) for t in train] == [
        "SegColorJitter", "SegRandomFlip", "SegRandomRescale", "SegPadShortToCropSize", "SegCropImageAndMask",
        "SegStandardize", "SegNormalize", "SegConvertToTensor",
    ]  # fmt: skip
    assert set(only(train, "SegColorJitter").values()) == {jitter}
    assert only(train, "SegRandomRescale")["scales"] == scales
    assert only(train, "SegPadShortToCropSize") == {"crop_size": crop, "fill_mask": 19}
    assert only(train, "SegCropImageAndMask") == {"crop_size": crop, "mode": "random"}
    val = data["val_dataset_params"]["transforms"]
    assert val[0] == first or (first is None and "SegStandardize" in val[0])
    loaders = [data[f"{split}_dataloader_params"] for split in ("train", "val")]
    assert tuple(loader["batch_size"] for loader in loaders) == batches
    assert loaders[0]["shuffle"]
    assert loaders[0]["drop_last"]
    assert params["max_epochs"] == epochs
    assert params["initial_lr"] == lr
    assert params["lr_mode"] == "PolyLRScheduler"
    assert params.get("lr_warmup_epochs", 0) == warmup
    assert params["optimizer"] == optimizer
    if optimizer == "SGD":
        assert params["optimizer_params"] == {"momentum": 0.9, "weight_decay": 5e-4}
    assert params["zero_weight_decay_on_bias_and_bn"] == zero
    assert params["ema"] == ema
    assert params["ema_params"] == {"decay": 0.9999, "decay_type": "exp", "beta": 15}
    assert params["sync_bn"] is True
    assert params["mixed_precision"] is False
    assert {"IoU": {"num_classes": 20, "ignore_index": 19}} in params["valid_metrics_list"]
    assert params["metric_to_watch"] == "IoU"
    assert recipe["multi_gpu"] == "DDP"


def test_shortcuts_work_in_recipes_that_do_not_include_them(tmp_path):
    overrides = [
        "lr=0.5",
        "batch_size=3",
        "val_batch_size=5",
        "ema=False",
        "epochs=7",
        "resume=True",
        "num_workers=1",
    ]
    (tmp_path / "bare.yaml").write_text(RECIPES["stdc_seg75"])
    for name in ("cityscapes_ddrnet", "bare"):
        recipe = compose(name, overrides, tmp_path)
        params, data = recipe["training_hyperparams"], recipe["dataset_params"]
        assert (params["initial_lr"], params["ema"], params["max_epochs"], params["resume"]) == (
            0.5,
            False,
            7,
            True,
        )
        assert data["train_dataloader_params"]["batch_size"] == 3
        assert data["val_dataloader_params"]["batch_size"] == 5
        assert {data[f"{split}_dataloader_params"]["num_workers"] for split in ("train", "val")} == {1}
        assert "lr" not in recipe


def test_groups_in_config_dir_take_precedence(tmp_path):
    (tmp_path / "training_hyperparams").mkdir()
    (tmp_path / "training_hyperparams/mine.yaml").write_text(
        "defaults: [cityscapes_default_train_params]\nmax_epochs: 3\n"
    )
    (tmp_path / "checkpoint_params").mkdir()
    (tmp_path / "checkpoint_params/default_checkpoint_params.yaml").write_text("checkpoint_path: mine.pth\n")
    (tmp_path / "own.yaml").write_text("defaults: [cityscapes_regseg48, _self_]\nexperiment_name: own\n")
    recipe = compose("own", ["training_hyperparams=mine"], tmp_path)
    assert recipe["experiment_name"] == "own"
    assert recipe["checkpoint_params"]["checkpoint_path"] == "mine.pth"
    assert recipe["training_hyperparams"]["lr_mode"] == "PolyLRScheduler"
    assert (
        compose("cityscapes_ddrnet", ["training_hyperparams=mine"], tmp_path)["dataset_params"]
        == (compose("cityscapes_ddrnet")["dataset_params"])
    )


@pytest.mark.parametrize("name", RECIPES)
def test_supergradients_recipes_compose_unchanged(name, tmp_path, recwarn):
    (tmp_path / f"{name}.yaml").write_text(RECIPES[name])
    recipe = compose(name, config_dir=tmp_path)
    assert recipe["experiment_name"].endswith("_cityscapes")
    assert recipe["dataset_params"]["train_dataset_params"]["transforms"]
    assert recipe["checkpoint_params"]["strict_load"] in (True, "no_key_matching")
    assert not recwarn.list, [str(w.message) for w in recwarn]
    assert "super_gradients" not in sys.modules
    if name == "stdc_seg75":
        assert recipe["training_hyperparams"]["lr_updates"] == []
    if name == "regseg48":
        assert recipe["training_hyperparams"]["criterion_params"] == {"ignore_index": 19}


def test_overrides_take_precedence_over_training_params_in_a_file(tmp_path):
    (tmp_path / "guide.yaml").write_text(
        "defaults: [cityscapes_regseg48, _self_]\ntraining_params: {torch_compile: true, seed: 3}\n"
    )
    params = compose("guide", ["training_params.seed=5"], tmp_path)["training_hyperparams"]
    assert (params["torch_compile"], params["seed"], params["max_epochs"]) == (True, 5, 800)


def test_supergradients_resolvers_are_registered(tmp_path):
    (tmp_path / "sums.yaml").write_text(
        "architecture: x\nmany: [4, 5, 6]\nsum: ${add:1,2,3}\nchosen: ${cond:true,yes_,no_}\nfirst: ${first:${many}}\n"
        "last: ${last:${many}}\nitem: ${getitem:${many},1}\nfolder: ${hydra_output_dir:out,run}\n"
        "default: ${hydra_output_dir:null,run}\nname: ${class:torch.optim.Adam}\n"
    )
    recipe = compose("sums", config_dir=tmp_path)
    assert recipe | {"many": 0} == {
        "architecture": "x", "many": 0, "sum": 6, "chosen": "yes_", "first": 4, "last": 6, "item": 5,
        "folder": "out/run", "default": "work_dirs/run", "name": "torch.optim.Adam",
    }  # fmt: skip


def test_compose_works_inside_a_hydra_job(tmp_path):
    (tmp_path / "job.yaml").write_text("value: 3\n")
    (tmp_path / "job.py").write_text(
        "import hydra\n"
        "from hydra.core.hydra_config import HydraConfig\n"
        "from slipstream.recipes import compose\n"
        f"@hydra.main(version_base='1.3', config_path={str(tmp_path)!r}, config_name='job')\n"
        "def main(cfg):\n"
        "    before = HydraConfig.get().job.name\n"
        "    assert compose('cityscapes_ddrnet')['architecture'] == 'ddrnet_23'\n"
        "    assert HydraConfig.get().job.name == before and cfg.value == 3\n"
        "    print('composed')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "job.py", "hydra.run.dir=."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "composed\n", done.stderr
