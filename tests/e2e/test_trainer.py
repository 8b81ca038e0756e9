"""Test that examples from SuperGradients' guide to faster training run unchanged, except for the package name."""

import re
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Trainer
from slipstream.model import unwrap_model

# The guide omits these values ("..."). The `aot_eager` backend is used instead of inductor because it compiles several
# seconds faster.
OTHERS = dict(
    max_epochs=1,
    initial_lr=0.1,
    loss="CrossEntropyLoss",
    valid_metrics_list=["Accuracy"],
    torch_compile_options=dict(backend="aot_eager"),
    silent_mode=True,
)


@pytest.fixture
def parts():
    inputs = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.mean((1, 2, 3)).gt(0).long())
    body = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return dict(
        model=nn.Sequential(*body), train_loader=DataLoader(data, 8), valid_loader=DataLoader(data, 8)
    )


@pytest.mark.parametrize(
    "yaml_text",
    [
        "torch_compile: True\nema: False",
        "torch_compile: True\nmixed_precision: True",
        "mixed_precision: True",
    ],
)
def test_yaml_example_runs_unchanged(tmp_path, parts, yaml_text):
    from omegaconf import OmegaConf

    recipe = OmegaConf.create("training_params:\n" + textwrap.indent(yaml_text, "  "))
    trainer = Trainer("experiment_name", tmp_path)
    trainer.train(training_params={**OTHERS, **recipe.training_params}, **parts)
    asked = set(re.findall(r"(\w+): True", yaml_text))
    assert (trainer.runner.speed.compile is not None) == ("torch_compile" in asked)
    assert (trainer.runner.speed.precision is not None) == ("mixed_precision" in asked)
    assert "_orig_mod" not in " ".join(unwrap_model(trainer.runner.model).state_dict())


def test_ema_works_with_a_compiled_model(tmp_path, parts):
    trained = []
    for compiled in (False, True):
        torch.manual_seed(0)
        parts["model"][0].reset_parameters()
        parts["model"][5].reset_parameters()
        parts["model"][1].reset_running_stats()
        parts["model"][1].reset_parameters()
        trainer = Trainer(f"compiled_{compiled}", tmp_path)
        params = {**OTHERS, "max_epochs": 2, "torch_compile": compiled, "ema": True}
        history = trainer.train(training_params=params, **parts)
        trained.append((history, parts["model"][0].weight.detach().clone()))
    assert trained[0][0] == trained[1][0]
    torch.testing.assert_close(trained[0][1], trained[1][1], rtol=1e-4, atol=1e-5)


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from slipstream import Trainer
from slipstream.dist import get_rank, get_world_size

inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.mean(1).gt(0).long())
torch.manual_seed(0)
net = nn.Linear(4, 2)
params = dict(
    max_epochs=3, initial_lr=0.5, loss="CrossEntropyLoss", valid_metrics_list=["Accuracy"], multi_gpu="DDP",
    lr_mode="poly", silent_mode=True, optimizer_params=dict(weight_decay=0.0, momentum=0.9),
)
batch = int(sys.argv[1])
history = Trainer("exp", sys.argv[2]).train(net, params, DataLoader(data, batch), DataLoader(data, 4))
torch.save(dict(net=net.state_dict(), accuracy=history[-1]["Accuracy"]), f"{sys.argv[2]}/rank{get_rank()}.pt")
"""


@pytest.mark.slow
def test_torchrun_processes_train_one_network(tmp_path, run):
    (tmp_path / "train.py").write_text(SCRIPT)
    run("train.py", "16", "one")
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", "8", "two")
    one = torch.load(tmp_path / "one" / "rank0.pt")
    for rank in range(2):
        two = torch.load(tmp_path / "two" / f"rank{rank}.pt")
        torch.testing.assert_close(two["net"], one["net"])
        assert two["accuracy"] == pytest.approx(one["accuracy"])
