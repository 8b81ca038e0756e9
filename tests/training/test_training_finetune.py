"""Tests of parameters that `finetune` or a learning rate of 0 freezes, and of resuming without the optimizer state."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Trainer
from slipstream.hooks import Hook
from slipstream.optim import build_optim_wrapper
from slipstream.training.network import SupervisedModel
from slipstream.training.recipe import runner_config

HEADS = {
    ("pp_lite_t_seg", True): {"seg_head", "aux_heads"},
    ("pp_lite_t_seg", False): {"seg_head"},
    ("stdc1_seg", True): {"segmentation_head", "aux_head_s16", "aux_head_s32", "detail_head8"},
    ("stdc1_seg", False): {"segmentation_head"},
    ("ddrnet_23_slim", True): {"final_layer", "seghead_extra"},
    ("ddrnet_23_slim", False): {"final_layer"},
    ("regseg48", None): {"head"},
    ("segformer_b0", None): {"decode_head"},
    ("resnet18", None): {"fc"},
}
QUIET = dict(max_epochs=1, loss="CrossEntropyLoss", silent_mode=True, save_model=False)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.neck = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.neck(self.norm(self.body(x)).relu()))


class Tunable(Network):
    def get_finetune_lr_dict(self, lr):
        return {"head": lr, "neck": lr / 10, "default": 0}


class Groups(Hook):
    def before_train(self, runner):
        named = {id(p): name for name, p in runner.model.network.named_parameters()}
        self.rates = {
            named[id(p)]: float(g["lr"]) for g in runner.optim_wrapper.param_groups for p in g["params"]
        }
        self.learning = {name for name, p in runner.model.network.named_parameters() if p.requires_grad}


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), 8)


def tensors(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def moved(net, before):
    return {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
NECK_AND_HEAD = {"neck.weight", "neck.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("net", "params"),
    [
        (Tunable, dict(finetune=True, initial_lr=0.1)),
        (Network, dict(initial_lr={"head": 0.1, "neck": 0.01, "default": 0})),
    ],
)
@pytest.mark.parametrize("compile", [False, dict(scope="step", backend="eager")])
def test_parameters_with_rate_0_are_constant_despite_weight_decay(tmp_path, net, params, compile):
    network, groups = net(), Groups()
    before = tensors(network)
    decay = dict(optimizer="AdamW", optimizer_params=dict(weight_decay=0.5), phase_callbacks=[groups])
    Trainer("exp", tmp_path).train(
        network, {**QUIET, **params, **decay, "ema": True, "speed": dict(compile=compile)}, data()
    )
    assert moved(network, before) == NECK_AND_HEAD | STATISTICS
    rates = {name: 0.1 if name.startswith("head") else 0.01 for name in NECK_AND_HEAD}
    assert groups.rates == pytest.approx(rates)
    assert groups.learning == NECK_AND_HEAD
    assert all(parameter.requires_grad for parameter in network.parameters()), (
        "some parameters are still frozen after the run"
    )


def test_parameters_that_a_callback_unfreezes_are_trained(tmp_path):
    class Unfreeze(Hook):
        def before_train_epoch(self, runner):
            runner.model.network.body.requires_grad_(runner.epoch == 1)

    network = Network()
    network.body.requires_grad_(False)
    before = tensors(network)
    params = dict(
        QUIET, max_epochs=2, initial_lr={"body": 0.1, "default": 0.01}, phase_callbacks=[Unfreeze()]
    )
    Trainer("exp", tmp_path).train(network, params, data())
    assert {"body.weight", "body.bias"} <= moved(network, before)


@pytest.mark.parametrize(("name", "aux"), HEADS)
def test_finetune_trains_the_heads_of_each_zoo_network(name, aux):
    options = {} if aux is None else dict(use_aux_heads=aux)
    params = dict(QUIET, finetune=True, initial_lr=0.1)
    cfg = runner_config(
        experiment_name="exp", ckpt_root_dir=None, model={"network": dict(type=name, num_classes=3, **options)},
        training_params=params, train_dataloader={}, val_dataloader=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = SupervisedModel(**{key: value for key, value in cfg["model"].items() if key != "type"})
    learning = {name.split(".")[0] for name, p in model.network.named_parameters() if p.requires_grad}
    frozen = {name.split(".")[0] for name, p in model.network.named_parameters() if not p.requires_grad}
    assert learning == HEADS[name, aux]
    assert frozen
    assert not learning & frozen
    optim = build_optim_wrapper(model, cfg["optim_wrapper"])
    assert {g["lr"] for g in optim.param_groups} == {0.1}
    assert len(list(optim.parameters())) == sum(p.requires_grad for p in model.parameters())


# ---- optimizer reset on resume ---------------------------------------------------------------------------


def resumed(folder, **params):
    """Train one epoch and resume for a second one. Return both networks and the state at the start of the second."""

    class State(Hook):
        def before_train(self, runner):
            self.optimizer = runner.optim_wrapper.optimizer.state_dict()
            self.at = (runner.epoch, runner.iter)

    state, common = State(), {**QUIET, "save_model": True, "average_best_models": False}
    common |= dict(lr_mode="PolyLRScheduler", initial_lr={"head": 0.01, "default": 0.1}, max_epochs=2)
    first = Network()

    class Stop(Hook):
        def after_train_epoch(self, runner):
            runner.train_loop.stop_training = True

    Trainer("exp", folder).train(first, {**common, "phase_callbacks": [Stop()]}, data())
    again = {**common, "resume": True, **params, "phase_callbacks": [state]}
    Trainer("exp", folder).train(network := Network(), again, data())
    return first, network, state


def by_hand(first):
    """Train the second epoch (three steps) in plain PyTorch, without the momentum of the first epoch."""
    params = [dict(params=first.head.parameters(), start=0.01)]
    params += [dict(params=part.parameters(), start=0.1) for part in (first.body, first.norm, first.neck)]
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=0.9, weight_decay=1e-4)
    for step, (inputs, targets) in enumerate(data(), start=3):
        for group in optimizer.param_groups:
            group["lr"] = group["start"] * (1 - (step - 1) / 6) ** 0.9
        optimizer.zero_grad()
        nn.functional.cross_entropy(first.train()(inputs), targets).backward()
        optimizer.step()


def test_resuming_without_optimizer_state_keeps_weights_epoch_and_rates(tmp_path):
    first, network, state = resumed(tmp_path, load_opt_params=False)
    assert (state.at, state.optimizer["state"]) == ((1, 3), {})
    by_hand(first)
    for name, value in first.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], value, msg=name)
    _, with_moments, state = resumed(tmp_path / "b")
    assert state.optimizer["state"]
    assert not torch.allclose(with_moments.body.weight, network.body.weight)
