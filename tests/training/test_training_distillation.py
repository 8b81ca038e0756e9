"""Tests of knowledge distillation: training results, recipes, checkpoints without the teacher, and errors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from slipstream.errors import ModelError
from slipstream.registry import MODELS
from slipstream.runner import Runner
from slipstream.step.graph import GraphStep
from slipstream.training import KDTrainer
from slipstream.training.distillation import DistillationModel
from slipstream.training.recipe import recipe_config
from slipstream.zoo import KDLogitsLoss, NormalizationAdapter, models


class Net(nn.Module):
    """A small classifier with BatchNorm and dropout, so that training and evaluation mode differ."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 4)

    def forward(self, images):
        return self.head(self.dropout(self.norm(self.conv(images)).relu().mean((2, 3))))


def data(count=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 6, 6, generator=generator), torch.randint(4, (count,), generator=generator)


def networks():
    torch.manual_seed(1)
    return Net(6), Net(12, dropout=0.5)


LOSS = {"KDLogitsLoss": {"task_loss_fn": "CrossEntropyLoss", "distillation_loss_coeff": 0.7}}


def train(folder, student, teacher, adapter=None, **params):
    images, labels = data()
    loader = DataLoader(TensorDataset(images.to(student.head.weight.dtype), labels), batch_size=8)
    trainer = KDTrainer("run", str(folder))
    history = trainer.train(
        student=student,
        teacher=teacher,
        kd_arch_params={"teacher_input_adapter": adapter},
        training_params=dict(
            max_epochs=2, initial_lr=0.2, optimizer_params={"momentum": 0.9, "weight_decay": 0}, loss=LOSS,
            silent_mode=True, valid_metrics_list=["Accuracy"], train_metrics_list=["Accuracy"],
            average_best_models=False,
        ) | params,
        train_loader=loader,
        valid_loader=loader,
    )  # fmt: skip
    return trainer, history


def plain_loop(student, teacher, adapter=None):
    """Train a copy of the student for two epochs in float64 with plain PyTorch, and return it."""
    student, teacher = copy.deepcopy(student), copy.deepcopy(teacher).eval()
    optimizer = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9)
    images, labels = data()
    for _ in range(2):
        for x, y in zip(images.double().split(8), labels.split(8), strict=True):
            with torch.no_grad():
                wanted = teacher(x if adapter is None else adapter(x)).softmax(1)
            scores = student(x)
            apart = (wanted * (wanted.log() - scores.log_softmax(1))).sum() / len(x)
            loss = 0.3 * F.cross_entropy(scores, y) + 0.7 * apart
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return student


@pytest.mark.parametrize("adapted", [False, True])
def test_the_student_weights_match_a_plain_loop(tmp_path, adapted):
    student, teacher = (network.double() for network in networks())
    adapter = NormalizationAdapter([0.1] * 3, [0.5] * 3, [0.3] * 3, [0.2] * 3).double() if adapted else None
    wanted = plain_loop(student, teacher, adapter)
    before = copy.deepcopy(teacher.state_dict())
    train(tmp_path, student, teacher, adapter)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(student.state_dict()[name], value, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)


def test_checkpoints_average_and_optimizer_contain_only_the_student(tmp_path):
    student, teacher = networks()
    trainer, history = train(tmp_path, student, teacher, ema=True)
    model = trainer.runner.model
    names = {f"network.{name}" for name in student.state_dict()}
    assert set(model.state_dict()) == names
    for file in ("ckpt_latest.pth", "ckpt_best.pth"):
        state = torch.load(tmp_path / "run" / file, weights_only=True)
        assert set(state["state_dict"]) == names
        assert set(state["ema_state_dict"]) == {"steps", *(f"module.{name}" for name in names)}
    trained = {id(p) for group in trainer.runner.optim_wrapper.param_groups for p in group["params"]}
    assert trained == set(map(id, student.parameters()))
    assert copy.deepcopy(model).teacher is model.teacher
    again = Net(6)
    models.load(again, tmp_path / "run/ckpt_best.pth")
    assert trainer.test(test_loader=trainer.runner.val_dataloader) == pytest.approx(
        {"Accuracy": history[-1]["Accuracy"]}
    )


@pytest.mark.parametrize(
    ("speed", "tolerance"),
    [
        pytest.param({"compile": {"scope": "step", "backend": "aot_eager"}}, 1e-5, marks=pytest.mark.slow),
        ({"compile": {"scope": "step", "backend": "aot_eager"}, "precision": "bf16"}, 5e-3),
        ({"precision": "bf16", "accumulate": 2, "channels_last": True}, 5e-3),
    ],
)
def test_options_produce_the_same_weights_as_the_eager_run(tmp_path, speed, tolerance):
    other = {key: value for key, value in speed.items() if key not in ("compile", "channels_last")}
    student, teacher = networks()
    again = copy.deepcopy(student)
    trainer, _ = train(tmp_path / "fast", student, teacher, ema=True, speed=speed)
    plain, _ = train(tmp_path / "plain", again, teacher, ema=True, speed=other or None)
    assert isinstance(trainer.runner.step, GraphStep) is ("compile" in speed)
    torch.testing.assert_close(student.state_dict(), again.state_dict(), rtol=tolerance, atol=tolerance)
    averages = [
        torch.load(tmp_path / name / "run/ckpt_latest.pth", weights_only=True)["state_dict"]
        for name in ("fast", "plain")
    ]
    torch.testing.assert_close(*averages, rtol=tolerance, atol=tolerance)
    assert plain.runner.iter == trainer.runner.iter == 8


def test_the_conversion_of_a_copy_does_not_change_the_teacher_of_the_original():
    model = DistillationModel(*networks(), KDLogitsLoss(nn.CrossEntropyLoss()))
    plain = copy.deepcopy(model)
    images, labels = data(4)
    converted = copy.deepcopy(plain.float()).double()
    assert plain.teacher is model.teacher  # converting to the same dtype does not copy the teacher
    assert {p.dtype for p in converted.teacher.parameters()} == {torch.float64}
    assert {p.dtype for p in model.teacher.parameters()} == {torch.float32}
    found = converted.eval()(images.double(), labels, mode="loss")
    wanted = model.eval()(images, labels, mode="loss")
    torch.testing.assert_close({name: value.float() for name, value in found.items()}, wanted)


def recipe(folder, **keys):
    torch.save({"net": models.get("resnet18_cifar", num_classes=4).state_dict()}, folder / "teacher.pth")
    dataset = {"_target_": "torch.utils.data.TensorDataset"}
    return {
        "architecture": "kd_module",
        "arch_params": {"teacher_input_adapter": {"NormalizationAdapter": {
            "mean_original": [0.0], "std_original": [1.0], "mean_required": [0.5], "std_required": [0.5]}}},
        "student_architecture": "resnet18_cifar",
        "student_arch_params": {"num_classes": 4},
        "teacher_architecture": "resnet18_cifar",
        "teacher_arch_params": {"num_classes": 4},
        "teacher_checkpoint_params": {
            "checkpoint_path": str(folder / "teacher.pth"), "pretrained_weights": "imagenet"},
        "run_teacher_on_eval": True,
        "experiment_name": "run",
        "ckpt_root_dir": str(folder),
        "dataset_params": {f"{split}_dataloader_params": {"dataset": dataset} for split in ("train", "val")},
        "training_hyperparams": {"max_epochs": 1, "initial_lr": 0.1, "loss": LOSS},
    } | keys  # fmt: skip


def test_a_recipe_loads_the_weights_of_the_teacher(tmp_path):
    config = recipe_config(recipe(tmp_path))["model"]
    assert config["type"] == "DistillationModel"
    torch.manual_seed(2)
    model = MODELS.build(config)
    with pytest.raises(ModelError, match="teacher's weights have not been loaded"):
        model.loss_inputs(torch.zeros(1, 4), torch.zeros(1, 3, 8, 8), None)
    model.init_weights()
    adapter, teacher = model.teacher
    wanted = torch.load(tmp_path / "teacher.pth", weights_only=True)["net"]
    torch.testing.assert_close(teacher.state_dict(), wanted)
    torch.testing.assert_close(adapter(torch.ones(1, 3, 1, 1)), torch.ones(1, 3, 1, 1))
    assert not model.network.state_dict()["conv1.weight"].equal(wanted["conv1.weight"])


class Pixels(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


def runner(folder, **keys):
    config = recipe_config(recipe(folder))
    config["model"]["watched_losses"] = ["KDLogitsLoss"]
    loader = {"dataset": Pixels(), "batch_size": 2}
    evaluator = {"type": "ValidationLoss", "names": ["KDLogitsLoss"]}
    config |= {"train_dataloader": loader, "val_dataloader": loader, "val_evaluator": evaluator}
    return Runner.from_cfg(config | {"default_hooks": {}} | keys)


def test_a_resumed_run_reads_the_teacher_again(tmp_path):
    runner(tmp_path).train()
    run = runner(tmp_path, resume=True, train_cfg={"by_epoch": True, "max_epochs": 2})
    wanted = torch.load(tmp_path / "teacher.pth", weights_only=True)["net"]
    model = run.train()
    assert run.epoch == 2
    torch.testing.assert_close(model.teacher[1].state_dict(), wanted, rtol=0, atol=0)
