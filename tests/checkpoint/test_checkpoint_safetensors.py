"""Tests of weights in safetensors files, including files and folders as Hugging Face's libraries write them."""

import json

import pytest
import torch
from torch import nn

from slipstream.checkpoint import load_checkpoint, save_checkpoint
from slipstream.cli.main import main
from slipstream.errors import CheckpointError, ConfigError
from slipstream.hooks import CheckpointHook
from slipstream.train_step import accelerate
from slipstream.zoo import models
from tiny_runs import Net, run, weights

safetensors = pytest.importorskip("safetensors.torch")


def network(seed=0):
    torch.manual_seed(seed)
    return Net(norm=True)


def write_shards(state, folder):
    """Write the files of a model as `save_pretrained` does for a small `max_shard_size`."""
    folder.mkdir()
    names, places = list(state), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["file", "any name", "folder", "index", "shards"])
def test_a_run_starts_from_weights_of_hugging_face(kind, tmp_path):
    state = network().state_dict()
    single = tmp_path / "single" / ("model.pth" if kind == "any name" else "model.safetensors")
    single.parent.mkdir()
    safetensors.save_file(state, single)
    shards = write_shards(state, tmp_path / "shards")
    sources = {"folder": single.parent, "index": shards / "model.safetensors.index.json", "shards": shards}
    for resume in (False, True):
        trained = run(
            tmp_path / f"run{resume}", model=network(1), load_from=str(sources.get(kind, single)), resume=resume,
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        )  # fmt: skip
        for name, value in trained.model.named_parameters():
            assert torch.equal(value, state[name]), name
    assert run(tmp_path / "runTrue", model=network(1), resume=True).epoch == 2


def test_saved_weights_are_those_of_torch(tmp_path):
    model = network()
    model.tied = nn.ParameterList([model.last.weight])
    save_checkpoint(
        {"state_dict": model.state_dict(), "meta": {"iter": 3}}, tmp_path / "a.safetensors", pytest.fail
    )
    loaded = safetensors.load_file(tmp_path / "a.safetensors")
    torch.testing.assert_close(loaded, dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(load_checkpoint(tmp_path / "a.safetensors"), loaded, rtol=0, atol=0)


def test_a_training_step_saves_the_average(tmp_path):
    model = nn.Linear(2, 1)
    step = accelerate(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.MSELoss(),
        speed=dict(ema=dict(type="threshold", decay=0.5)),
    )
    for _ in range(3):
        step((torch.ones(4, 2), torch.zeros(4, 1)))
    step.save(tmp_path / "w.safetensors")
    expected = {name: value.clone() for name, value in step.average.module.state_dict().items()}
    torch.testing.assert_close(safetensors.load_file(tmp_path / "w.safetensors"), expected, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        step.load(tmp_path / "w.safetensors")


def test_a_checkpoint_is_exported(tmp_path, capsys):
    trained = run(tmp_path, default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=2)))
    assert main(["export", str(tmp_path / "epoch_2.pth"), "--to", "safetensors"]) == 0
    torch.testing.assert_close(
        safetensors.load_file(tmp_path / "epoch_2.safetensors"), weights(trained), rtol=0, atol=0
    )
    other = models.get("resnet18_cifar", 10)
    torch.save(
        {f"network.{name}": value for name, value in other.state_dict().items()}, tmp_path / "task.pth"
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "task.pth"),
                "--to",
                "safetensors",
                "--out",
                str(tmp_path / "t.safetensors"),
            ]
        )
        == 0
    )
    assert safetensors.load_file(tmp_path / "t.safetensors").keys() == other.state_dict().keys()
    loaded = models.get("resnet18_cifar", 10, checkpoint_path=tmp_path / "t.safetensors")
    torch.testing.assert_close(loaded.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["cut", "missing", "outside", "incomplete", "json"])
def test_damaged_files_are_reported(damage, tmp_path):
    folder = write_shards(network().state_dict(), tmp_path / "model")
    index, first = folder / "model.safetensors.index.json", folder / "model-00001-of-00002.safetensors"
    content = json.loads(index.read_text())
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-5])
    elif damage == "missing":
        first.unlink()
    elif damage == "json":
        index.write_text("[")
    else:
        content["weight_map"]["extra"] = f"../{first.name}" if damage == "outside" else first.name
        index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_checkpoint(folder)


def test_a_hook_does_not_save_weights_alone():
    with pytest.raises(ConfigError, match="cannot resume from weights alone"):
        CheckpointHook(filename_tmpl="epoch_{}.safetensors")
