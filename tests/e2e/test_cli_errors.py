"""Tests of command-line errors, and of the commands `recipes`, `doctor` and `consolidate`.

For an invalid argument, a command exits with status 2 and prints one line with the config path and a suggestion.
"""

import pytest
import torch

from slipstream.cli.main import main
from slipstream.cli.parser import parse
from slipstream.zoo.street_scenes.folder import write_street_folder

RECIPE = "street_scenes_pp_lite_t"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], ["'trian'", "choose from 'new', 'check', 'train'"]),
        (["train", "street_scenes_pp_lite"], ["'street_scenes_pp_lite'", f"did you mean '{RECIPE}'"]),
        (["train", "nowhere.yaml"], ["nowhere.yaml"]),
        (["train", "x" * 300], ["no recipe is named"]),
        (["val", RECIPE, "model=null", "--checkpoint=x.pth"], ["model: must be"]),
        (["train", RECIPE, "train_cfg.max_epoch=3"], ["train_cfg", "did you mean 'max_epochs'"]),
        (["train", RECIPE, "batchsize=4"], ["batchsize", "did you mean 'batch_size'"]),
        (["train", RECIPE, "bath_size=4"], ["bath_size", "did you mean 'batch_size'"]),
        (["train", RECIPE, "learning_rate=4"], ["learning_rate", "did you mean 'lr'"]),
        (["train", RECIPE, "val_batchsize=4"], ["val_batchsize", "did you mean 'val_batch_size'"]),
        (
            ["train", "nets.yaml", "batch_size=4"],
            ["batch_size: sets train_dataloader.batch_size, whose section does not exist"],
        ),
        (["train", RECIPE, "--batch-size=4"], ["--batch-size=4", "without dashes: batch_size=4"]),
        (["train", RECIPE, "--work_dir", "x"], ["--work_dir", "did you mean '--work-dir'"]),
        (["export", "run"], ["--to"]),
        (["recipes", "show", "camvid_regseg49"], ["did you mean 'camvid_regseg48'"]),
        (["train", RECIPE, "train_cfg.max_epochs=many"], ["train_cfg.max_epochs", "int", "'many'"]),
        (
            ["train", RECIPE, "optim_wrapper.optimizer.type=Adamm"],
            ["optim_wrapper.optimizer", "did you mean 'Adam'"],
        ),
        (
            ["train", RECIPE, "optim_wrapper.optimizer.lrr=1"],
            ["optim_wrapper.optimizer", "did you mean 'lr'"],
        ),
        (["train", RECIPE, "train_dataloader.batch_size=x"], ["train_dataloader.batch_size", "'x'"]),
        (["train", RECIPE, "val_evaluator.type=IoUMetrik"], ["val_evaluator", "did you mean 'IoUMetric'"]),
        (["train", RECIPE, "randomness.seed=x"], ["randomness.seed", "or None", "'x'"]),
        (
            ["train", RECIPE, "model.network.type=pp_lite_x_seg"],
            ["model.network", "did you mean 'pp_lite_t_seg'"],
        ),
        (["train", RECIPE, "--launcher", "slrum"], ["'slrum'", "'slurm'"]),
        (["train", RECIPE, "--nproc", "2", "--launcher", "slurm"], ["--launcher", "--nproc"]),
        (["train", RECIPE, "--nproc", "two"], ["--nproc", "'two'"]),
        (["val", RECIPE, "--max-restarts", "2"], ["`--max-restarts` requires `--nproc`"]),
        (["train", RECIPE, "--nprok", "2"], ["--nprok"]),
        (["train", RECIPE, "speed=compile"], ["speed: ", "'auto'", "speed.compile=True"]),
        (["train", RECIPE, "compile=maybe"], ["compile", "'maybe'"]),
        (["train", RECIPE, "compile.backend=inducter"], ["compile.backend", "did you mean 'inductor'"]),
        (["train", RECIPE, "train_cfg.by_epoch=maybe"], ["train_cfg.by_epoch", "'maybe'"]),
        (
            ["train", RECIPE, "optim_wrapper.accumulate=2"],
            ["optim_wrapper", "'accumulate'", "accumulative_counts"],
        ),
    ],
)
def test_invalid_argument_raises_a_one_line_error_with_suggestion(
    arguments, expected, tmp_path, monkeypatch, capfd
):
    """The command runs in this process, because the imports of a new process take seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.yaml").write_text("model: {type: Segmentor}\nval_dataloader: {batch_size: 1}\n")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # otherwise, `main` would set the variable permanently
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    said = capfd.readouterr()
    assert status == 2, said
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    for part in expected:
        assert part in lines[0]
    assert "Traceback" not in said.out


def test_failed_run_prints_one_line_and_exits_with_status_1(command, tmp_path):
    err = command(
        "train", "camvid_pp_lite_t", f"train_dataloader.dataset.data_root={tmp_path}/none", status=1
    ).err
    assert len(err.strip().splitlines()) == 1
    assert "none" in err


def test_package_import_and_help_do_not_import_torch(run):
    run("-c", "import slipstream, sys; assert 'torch' not in sys.modules", forked=False)
    code = (
        "import sys; from slipstream.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    )
    run("-c", code + "assert 'torch' not in sys.modules", forked=False)


def test_compiler_is_imported_lazily(run):
    code = "import sys, slipstream.runner, slipstream.training, slipstream.train_step\n"
    run(
        "-c", code + "assert not {'torch._dynamo', 'torch._inductor', 'sympy'} & {*sys.modules}", forked=False
    )


def test_recipes_are_listed_with_descriptions(command):
    listed = command("recipes").out
    assert "street_scenes_pp_lite_t" in listed
    assert "camvid_pp_lite_t" in listed
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed.splitlines())


def test_doctor_reports_launcher_and_ranks(command, monkeypatch):
    for name, value in dict(RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, MASTER_ADDR="n1", MASTER_PORT=29400).items():
        monkeypatch.setenv(name, str(value))
    said = command("doctor", status=None).out
    assert "gloo" in said
    assert "pytorch, RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, MASTER_ADDR=n1, MASTER_PORT=29400" in said


def test_consolidate_writes_one_file(command, run, tmp_path):
    run("-c", """if True:
        from pathlib import Path
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from slipstream.checkpoint import write_checkpoint
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        weight = distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        write_checkpoint({"state_dict": {"weight": weight}, "meta": {"epoch": 3}}, Path("epoch_3.pth"), print)
        dist.destroy_process_group()
    """)  # fmt: skip
    assert "epoch_3.sharded -> epoch_3.pth" in command("consolidate", "epoch_3.sharded").out
    whole = torch.load(tmp_path / "epoch_3.pth", weights_only=True)
    assert torch.equal(whole["state_dict"]["weight"], torch.arange(6.0).reshape(3, 2))
    assert whole["meta"]["epoch"] == 3
    command("consolidate", "epoch_3.sharded/", "other.pth")
    assert torch.load(tmp_path / "other.pth", weights_only=True)["meta"]["epoch"] == 3


def test_consolidate_of_an_unsharded_checkpoint_raises_a_one_line_error(command, tmp_path):
    torch.save({}, tmp_path / "epoch_3.pth")
    err = command("consolidate", "epoch_3.pth", status=1).err
    assert "epoch_3.pth is not a sharded checkpoint" in err
    assert len(err.strip().splitlines()) == 1


def test_override_after_resume_is_not_parsed_as_a_checkpoint():
    args = parse(["train", "street_scenes_pp_lite_t", "--resume", "train_cfg.max_epochs=2", "a=1"])
    assert args.resume is True
    assert sorted(args.overrides) == ["a=1", "train_cfg.max_epochs=2"]


def test_broken_image_in_a_worker_raises_a_one_line_error(slipstream, tmp_path):
    write_street_folder(tmp_path / "data", train=2, val=1, size=(64, 128))
    broken = next((tmp_path / "data/leftImg8bit/train").rglob("*.png"))
    broken.write_bytes(broken.read_bytes()[:500])
    done = slipstream(
        "train",
        "cityscapes_regseg48",
        f"data_root_dir={tmp_path / 'data'}",
        "batch_size=2",
        "num_workers=1",
        "num_gpus=1",
        status=1,
    )
    (line,) = [text for text in done.stderr.splitlines() if "INFO" not in text]
    assert line.startswith("slipstream: error: cannot read")
    assert broken.name in line
    assert "skip_errors" in line


def test_user_class_with_the_name_of_a_built_in_class_is_reported_without_another_key(slipstream, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom slipstream.registry import MODELS\n"
        "MODELS.register_module(module=type('DiceCEEdgeLoss', (nn.Module,), {'__module__': 'mine'}))\n"
    )
    (tmp_path / "c.py").write_text(
        "import sys\nsys.path.insert(0, '{{ fileDirname }}')\ncustom_imports = dict(imports=['mine'])\n"
        "model = dict(type='Segmentor', network=dict(type='unet'), loss=dict(type='DiceCEEdgeLoss'))\n"
    )
    done = slipstream("check", str(tmp_path / "c.py"), status=1)
    (line,) = done.stderr.strip().splitlines()
    assert "'DiceCEEdgeLoss' is already registered in the model registry by mine" in line
    assert "is already registered in the model registry by mine" in line
    assert "model.network" not in line
