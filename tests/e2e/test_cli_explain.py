"""Tests of the command `slipstream explain`."""

import pytest

from slipstream.cli.main import main

RECIPE = "street_scenes_pp_lite_t"


def explained(capsys, *arguments):
    assert main(["explain", RECIPE, *arguments]) == 0
    return capsys.readouterr().out


def row(printed, option):
    (line,) = (line for line in printed.splitlines() if line.strip().startswith(f"{option} "))
    return " ".join(line.split())


def test_explain_requires_no_data_or_work_dir(command, tmp_path):
    printed = command("explain", RECIPE, "speed.accumulate=4").out
    assert row(printed, "accumulate") == "accumulate 4 speed.accumulate"
    assert row(printed, "clip_grad") == "clip_grad max_norm=5.0 optim_wrapper.clip_grad"
    assert row(printed, "ema") == "ema momentum=0.01 custom_hooks.EMAHook"
    assert list(tmp_path.iterdir()) == []


def test_disabled_options_are_listed_in_one_line(capsys):
    (off,) = (line for line in explained(capsys, "compile=true").splitlines() if line.startswith("Off: "))
    assert "channels_last" in off
    assert "compile" not in off
    assert "clip_grad" not in off


def test_auto_lists_its_choices_with_reasons(capsys):
    printed = explained(capsys, "speed=auto")
    assert row(printed, "fused").startswith(
        "fused where supported auto torch's fused kernels, if the optimizer has them,"
    )
    assert row(printed, "compile").startswith("compile off auto ")


def test_options_show_their_changed_fields(capsys):
    printed = explained(capsys, "compile={scope: model, dynamic: false}", "speed.precision=tf32")
    assert row(printed, "compile") == "compile dynamic=False, scope=model compile"
    assert row(printed, "precision").startswith("precision tf32 speed.precision")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("parallel=ddp", "ddp"),
        ("parallel=fsdp2", "fsdp2"),
        ("parallel=hsdp", "hsdp, shard_size=machine"),
        ("parallel={type: fsdp2, param_dtype: bf16}", "fsdp2, param_dtype=bf16"),
        ("model_wrapper_cfg={type: MMFullyShardedDataParallel, wrap: [Block]}", "fsdp2, wrap=['Block']"),
    ],
)
def test_wrapper_shows_its_kind_and_changed_fields(capsys, word, value):
    place = word.split("=")[0]
    assert row(explained(capsys, word), "parallel").startswith(f"parallel {value} {place}")


def test_options_without_effect_and_machine_limits_are_listed(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.runner.builders.device_type", lambda: "cpu")
    printed = explained(capsys, "parallel=fsdp2")
    assert "fsdp2" in row(printed, "parallel")
    assert "no effect here: only one process is running" in printed
    limits = printed[printed.index("on this machine (cpu):") :]
    assert "precision=fp8: 'fp8' requires an NVIDIA GPU" in limits
    assert "cuda_graph=True: " in limits


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["speed.precision=fp8"], "speed.precision: 'fp8' requires an NVIDIA GPU"),
        (["speed.precison=bf16"], "speed.precison: no such option; did you mean 'precision'"),
        (["speed=fast"], "speed: must be 'auto' or a dict"),
        (["speed.clip_grad={max_norm: 1}"], "optim_wrapper.clip_grad: "),
        (["compile.scope=step", "parallel=hsdp"], "compile: scope='step'"),
        (["model.network.type=pp_lite_x_seg"], "did you mean 'pp_lite_t_seg'"),
        (["sped=auto"], "did you mean 'speed'"),
    ],
)
def test_invalid_plan_raises_a_one_line_error_with_status_2(capsys, arguments, expected, monkeypatch):
    monkeypatch.setattr("slipstream.runner.builders.device_type", lambda: "cpu")
    assert main(["explain", RECIPE, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line


def test_unknown_recipe_raises_an_error(capsys):
    assert main(["explain", "street_scene"]) == 2
    assert "street_scene" in capsys.readouterr().err


def test_explain_accepts_a_file_with_loss_fn(tmp_path, capsys):
    (tmp_path / "plain.yaml").write_text(
        "model: {type: torch.nn.Linear, in_features: 4, out_features: 3}\nloss_fn: {type: CrossEntropyLoss}\n"
        "optim_wrapper: {optimizer: {type: SGD, lr: 0.1}}\n"
    )
    assert main(["explain", str(tmp_path / "plain.yaml"), "speed.accumulate=4"]) == 0
    assert row(capsys.readouterr().out, "accumulate") == "accumulate 4 speed.accumulate"
