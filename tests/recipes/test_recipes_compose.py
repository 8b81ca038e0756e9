"""Tests of recipe composition: hyperparameters, overrides, resolvers and one-line error messages."""

import subprocess
import sys

import pytest
from predecessor_recipes import RECIPES

from slipstream.cli.configure import load_config
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.recipes import compose, find_recipe, is_composed, recipes
from slipstream.recipes.compose import hydra_overrides
from slipstream.speed import SpeedPlan
from slipstream.training.recipe import recipe_config

hydra = pytest.importorskip("hydra.core.global_hydra")
OmegaConf = pytest.importorskip("omegaconf").OmegaConf

COMPOSED = [name for name in recipes() if is_composed(find_recipe(name))]
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


@pytest.mark.parametrize("size", range(6))
def test_segformer_has_six_sizes(size):
    recipe, smallest = compose(f"cityscapes_segformer_b{size}"), compose("cityscapes_segformer")
    assert recipe["architecture"] == f"segformer_b{size}"
    assert recipe["experiment_name"] == f"segformer_b{size}_cityscapes"
    assert recipe["training_hyperparams"] == smallest["training_hyperparams"]


def test_each_model_has_a_recipe_for_both_small_datasets():
    for data in ("street_scenes", "camvid"):
        for model in ("pp_lite_t", "stdc1_seg", "regseg48", "ddrnet_23_slim", "segformer_b0"):
            assert f"{data}_{model}" in recipes()


@pytest.mark.parametrize(("data", "classes", "ignored"), [("street_scenes", 19, 255), ("camvid", 11, 11)])
@pytest.mark.parametrize("network", ["stdc1_seg", "regseg48", "ddrnet_23_slim", "segformer_b0"])
def test_small_recipes_differ_only_in_the_network_and_the_loss(network, data, classes, ignored):
    cfg, first = (load_config(f"{data}_{name}").cfg.to_dict() for name in (network, "pp_lite_t"))
    model, of_first = cfg.pop("model"), first.pop("model")
    assert {**cfg, "work_dir": None} == {**first, "work_dir": None}
    assert model["type"] == of_first["type"]
    assert model["pretrained"] == of_first["pretrained"] == {"checkpoint_path": None, "load_backbone": False}
    assert model["network"].pop("use_aux_heads", True) is True
    assert model["network"] == {"type": network, "num_classes": classes}
    assert model["loss"]["ignore_index"] == ignored
    assert model["loss"].get("num_classes", classes) == classes
    assert model["data_preprocessor"] == of_first["data_preprocessor"]


@pytest.mark.parametrize("name", COMPOSED)
def test_each_recipe_is_plain_data_with_a_description(name):
    def check(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (str, int, float, bool)
            assert "${" not in str(value)

    recipe = compose(name)
    check(recipe)
    assert "hydra" not in recipe
    assert recipes()[name]


@pytest.mark.parametrize("word", ["training_params.torch_compile", "training_hyperparams.torch_compile"])
def test_training_params_synonyms_accept_new_keys_without_plus(word):
    params = compose("cityscapes_pplite_seg75", [f"{word}=True", f"{word}_options.mode=default"])[
        "training_hyperparams"
    ]
    assert params["torch_compile"] is True
    assert params["torch_compile_options"] == {"mode": "default"}


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


def test_recipe_can_be_a_path_with_groups_in_its_folder(tmp_path):
    (tmp_path / "dataset_params").mkdir()
    (tmp_path / "dataset_params/mine.yaml").write_text("train_dataset_params: {root_dir: here}\n")
    path = tmp_path / "my.yaml"
    path.write_text("defaults: [cityscapes_regseg48, override dataset_params: mine, _self_]\n")
    assert compose(str(path))["dataset_params"] == {"train_dataset_params": {"root_dir": "here"}}


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


def test_list_item_can_be_overridden():
    word = "dataset_params.train_dataset_params.transforms.4.SegCropImageAndMask.crop_size=[64,32]"
    transforms = compose("cityscapes_ddrnet", [word])["dataset_params"]["train_dataset_params"]["transforms"]
    assert only(transforms, "SegCropImageAndMask") == {"crop_size": [64, 32], "mode": "random"}
    assert len(transforms) == 8


def test_data_root_dir_sets_all_data_folders():
    data = compose("cityscapes_segformer", ["data_root_dir=/my/data"])["dataset_params"]
    assert {data[f"{split}_dataset_params"]["root_dir"] for split in ("train", "val")} == {"/my/data"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["archtecture=x"], ["archtecture", "did you mean 'architecture'"]),
        (["learning_rate=0.1"], ["learning_rate", "did you mean 'lr'"]),
        (["dataset_params.train_dataset_parms.x=1"], ["did you mean 'dataset_params.train_dataset_params"]),
        (
            ["dataset_params=cityscapes_ddrnet_dataset_param"],
            ["did you mean 'cityscapes_ddrnet_dataset_params'"],
        ),
        (["training_params=mine"], ["training_hyperparams 'mine'", "default_train_params"]),
        (["lr=[1"], ["lr=[1", "key=value"]),
        (["lr"], ["'lr'", "key=value"]),
        (["lr=1,2"], ["lr=1,2", "--multirun"]),
        (["experiment_name=${nope}"], ["experiment_name", "nope"]),
        (["~nothing"], ["nothing"]),
        (["~dataset_params.train_dataset_params.transforms.0"], ["list"]),
        (["architecture.x=1"], ["architecture"]),
        (["+mine.a=???"], ["mine.a"]),
    ],
)
def test_invalid_override_raises_a_one_line_error(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        compose("cityscapes_ddrnet", overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "defaults:\n  - training_hyperparams: default_train_param\n",
            ["did you mean 'default_train_params'"],
        ),
        ("defaults:\n  - cityscapes_regsegg48\n", ["cityscapes_regsegg48"]),
        ("defaults: [_self_]\narchitecture: ${mine\n", ["broken.yaml"]),
        ("architecture: x\nother: ${missing.key}\n", ["other", "missing.key"]),
        ("architecture: x\nother: ${roboflow_dataset_num_classes:a}\n", ["other", "Roboflow"]),
        ("architecture: [\n", ["broken.yaml", "line"]),
    ],
)
def test_invalid_file_raises_a_one_line_error(text, expected, tmp_path):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose("broken", config_dir=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_is_composed_raises_an_error_for_invalid_yaml(tmp_path):
    (tmp_path / "broken.yaml").write_text("architecture: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*line"):
        is_composed(tmp_path / "broken.yaml")


def test_unknown_recipe_error_suggests_the_nearest_name(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'cityscapes_ddrnet'"):
        compose("cityscapes_ddrnett")
    (tmp_path / "my_own_net.yaml").write_text("architecture: x\n")
    with pytest.raises(UnknownNameError, match="did you mean 'my_own_net'"):
        compose("my_own_nett", config_dir=tmp_path)
    with pytest.raises(ConfigError, match="folder not found"):
        compose("cityscapes_ddrnet", config_dir=tmp_path / "none")


def test_compose_restores_hydra_state():
    OmegaConf.register_new_resolver("add", lambda *_: "the user's own", replace=True)
    try:
        first = compose("cityscapes_ddrnet", ["lr=0.1"])
        assert not hydra.GlobalHydra.instance().is_initialized()
        assert compose("cityscapes_ddrnet", ["lr=0.1"]) == first
        assert OmegaConf.to_container(OmegaConf.create({"x": "${add:1,2}"}), resolve=True) == {
            "x": "the user's own"
        }
        assert not OmegaConf.has_resolver("hydra_output_dir")
    finally:
        OmegaConf.clear_resolver("add")


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


def test_recipes_in_runner_syntax_are_not_composed(tmp_path):
    assert not is_composed(find_recipe("street_scenes_pp_lite_t"))
    assert is_composed(find_recipe("cityscapes_segformer_b3"))
    (tmp_path / "inherits.yaml").write_text("_base_: other.yaml\n")
    assert not is_composed(tmp_path / "inherits.yaml")


def test_multi_gpu_recipe_does_not_set_the_model_wrapper():
    overrides = ["+training_params.speed.parallel=fsdp2", "multi_gpu=DDP", "num_gpus=4"]
    cfg = recipe_config(compose("cityscapes_regseg48", overrides))
    assert cfg["training_params"]["speed"] == {"parallel": "fsdp2"}
    assert SpeedPlan.read(training_params=cfg["training_params"]).parallel.kind == "fsdp2"
    with pytest.raises(ConfigError, match="multi_gpu: must be DDP, AUTO or Off, not 'DPP'"):
        recipe_config(compose("cityscapes_regseg48", ["multi_gpu=DPP"]))


def test_hydra_overrides_expand_shortcuts_except_sweeps():
    overrides = hydra_overrides(
        find_recipe("cityscapes_ddrnet"), ["lr={default: 0.3}", "num_workers=2", "epochs=1,2"]
    )
    assert "lr={default: 0.3}" in overrides[0]
    shown = [word for word in overrides if word.startswith("++")]
    assert "++training_hyperparams.initial_lr={default:0.3}" in shown
    assert "++dataset_params.train_dataloader_params.num_workers=2" in shown
    assert "++dataset_params.val_dataloader_params.num_workers=2" in shown
    assert not any("max_epochs" in word for word in shown)
    assert hydra_overrides(find_recipe("cityscapes_ddrnet"), ["lr=null"]).count("++lr=null") == 1


def test_multi_gpu_mode_target_is_replaced_by_its_value(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "multi_gpu:\n  _target_: super_gradients.training.MultiGPUMode\n  value: DDP\n"
    )
    assert compose("mine", config_dir=tmp_path)["multi_gpu"] == "DDP"
