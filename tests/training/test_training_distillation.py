"""Tests of knowledge distillation: training results, recipes, checkpoints without the teacher, and errors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from slipstream.errors import CheckpointError, ConfigError, ModelError, UnknownNameError
from slipstream.registry import MODELS
from slipstream.runner import Runner
from slipstream.step.graph import GraphStep
from slipstream.training import KDTrainer, Trainer
from slipstream.training.distillation import DistillationModel
from slipstream.training.distillation import KDModule
from slipstream.training.recipe import recipe_config
from slipstream.zoo import KDLogitsLoss, KDOutput, NormalizationAdapter, models


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


class Features(KDModule):
    """A module that also passes the features of both networks to the loss."""

    def forward(self, x):
        return KDOutput(self.features(self.student, x), self.features(self.teacher, x))

    def features(self, network, x):
        found = network.norm(network.conv(x)).relu().mean((2, 3))
        return network.head(network.dropout(found)), found


class FeatureLoss(nn.Module):
    def forward(self, preds, target):
        (scores, found), (_, wanted) = preds
        return F.cross_entropy(scores, target) + (found.mean(1) - wanted.mean(1)).square().mean()


def train_module(folder, module, **params):
    images, labels = data()
    loader = DataLoader(TensorDataset(images.to(module.student.head.weight.dtype), labels), batch_size=8)
    trainer = KDTrainer("run", str(folder))
    trainer.train(
        model=module,
        training_params=dict(
            max_epochs=2, initial_lr=0.2, optimizer_params={"momentum": 0.9, "weight_decay": 0}, loss=FeatureLoss(),
            silent_mode=True, valid_metrics_list=["Accuracy"], train_metrics_list=["Accuracy"],
        ) | params,
        train_loader=loader,
        valid_loader=loader,
    )  # fmt: skip
    return trainer


def test_a_customized_module_gives_its_outputs_to_the_loss(tmp_path):
    student, teacher = (network.double() for network in networks())
    module, loss = Features(student=copy.deepcopy(student), teacher=teacher), FeatureLoss()
    optimizer = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9)
    teacher.eval()
    images, labels = data()
    for _ in range(2):
        for x, y in zip(images.double().split(8), labels.split(8), strict=True):
            optimizer.zero_grad()
            loss(KDOutput(module.features(student, x), module.features(teacher, x)), y).backward()
            optimizer.step()
    before = copy.deepcopy(teacher.state_dict())
    trainer = train_module(tmp_path, module, ema=True)
    torch.testing.assert_close(module.student.state_dict(), student.state_dict(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert trainer.net is module.student
    state = torch.load(tmp_path / "run/ckpt_best.pth", weights_only=True)["state_dict"]
    assert set(state) == {f"network.{name}" for name in student.state_dict()}


class Projected(Features):
    """A module with a parameter that belongs to neither the student nor the teacher."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.projection = nn.Linear(4, 4)


def test_parameters_outside_of_the_networks_are_rejected(tmp_path):
    module = Projected(student=networks()[0], teacher=networks()[1])
    with pytest.raises(
        ConfigError, match=r"Projected contains 'projection\.weight' outside of the student and the"
    ):
        train_module(tmp_path, module)


def test_a_customized_module_has_the_mode_of_the_model():
    module = Features(student=networks()[0], teacher=networks()[1])
    model = DistillationModel(module.student, module.teacher, FeatureLoss(), kd_module=module)
    for mode in (False, True):
        model.train(mode)
        assert (module.training, module.student.training, module.teacher.training) == (mode, mode, False)


def test_a_copy_of_a_customized_module_uses_its_own_student_and_its_teacher():
    module = Features(student=networks()[0], teacher=networks()[1])
    model = DistillationModel(module.student, module.teacher, FeatureLoss(), kd_module=module)
    copied = copy.deepcopy(model).double()
    images, labels = data(4)
    with torch.no_grad():
        copied.network.head.bias += 1
    found = copied.loss_inputs(None, images.double(), labels)
    wanted = module(images)
    torch.testing.assert_close(found.student_output[0].float(), wanted.student_output[0] + 1)
    torch.testing.assert_close(found.teacher_output[0].float(), wanted.teacher_output[0])
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_module_that_is_not_customized_trains_like_its_separate_networks(tmp_path):
    student, teacher = networks()
    adapter = NormalizationAdapter([0.1] * 3, [0.5] * 3, [0.3] * 3, [0.2] * 3)
    again = copy.deepcopy(student)
    train(tmp_path / "networks", student, teacher, adapter)
    module = KDModule({"teacher_input_adapter": adapter}, again, teacher, run_teacher_on_eval=True)
    assert not module.train().teacher.training
    train_module(tmp_path / "module", module, loss=LOSS, average_best_models=False)
    torch.testing.assert_close(again.state_dict(), student.state_dict(), rtol=0, atol=0)


def test_a_customized_module_cannot_have_an_adapter(tmp_path):
    student, teacher = networks()
    with pytest.raises(ConfigError, match=r"Features overrides forward; set teacher to nn\.Sequential"):
        train_module(tmp_path, Features({"teacher_input_adapter": nn.Identity()}, student, teacher))


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


def test_predictions_come_from_the_student():
    student, teacher = networks()
    model = DistillationModel(student, teacher, KDLogitsLoss(nn.CrossEntropyLoss())).eval()
    images, labels = data(4)
    torch.testing.assert_close(model(images, labels, mode="predict")["preds"], student(images))
    model.train()
    assert student.training
    assert not teacher.training
    outputs = model.loss_inputs(student(images), images, labels)
    assert isinstance(outputs, KDOutput)
    assert not outputs.teacher_output.requires_grad
    assert next(model.double().teacher.parameters()).dtype == torch.float64


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


def test_a_timm_teacher_may_have_pretrained_weights(tmp_path):
    keys = {"teacher_architecture": "timm:resnet18", "teacher_arch_params": {"num_classes": 4}}
    given = recipe(tmp_path, **keys, teacher_checkpoint_params={"pretrained_weights": "imagenet"})
    config = recipe_config(given)["model"]
    assert config["teacher"]["type"] == "TimmClassifier"
    assert config["teacher"]["pretrained"] is True
    assert not config["teacher_pretrained"]
    with pytest.raises(ConfigError, match="untrained teacher"):
        recipe_config(given | {"teacher_checkpoint_params": {}})


@pytest.mark.parametrize(
    ("keys", "message", "path"),
    [
        (
            {"teacher_checkpoint_params": {}},
            "is required.*untrained teacher",
            "teacher_checkpoint_params.checkpoint_path",
        ),
        (
            {"teacher_checkpoint_params": {"pretrained_weights": "imagenet"}},
            "weights are not downloaded by name",
            "teacher_checkpoint_params.pretrained_weights",
        ),
        ({"teacher_architecture": None}, "is missing", "teacher_architecture"),
        ({"student_architecture": 3}, "must be a str", "student_architecture"),
        ({"run_teacher_on_eval": False}, "must be True", "run_teacher_on_eval"),
        (
            {"arch_params": {"student_input_adapter": {}}},
            "is not supported",
            "arch_params.student_input_adapter",
        ),
        ({"arch_params": {"teacher_adapter": {}}}, "unknown key", "arch_params.teacher_adapter"),
    ],
)
def test_an_invalid_recipe_names_its_key(tmp_path, keys, message, path):
    with pytest.raises(ConfigError, match=message) as error:
        recipe_config(recipe(tmp_path, **keys))
    assert error.value.path == path


def test_a_teacher_and_a_distillation_loss_require_each_other(tmp_path):
    student, teacher = networks()
    with pytest.raises(ConfigError, match="CrossEntropy does not use the teacher; use KDLogitsLoss"):
        train(tmp_path, student, teacher, loss="CrossEntropyLoss")
    images, labels = data()
    with pytest.raises(ModelError, match="train with KDTrainer"):
        Trainer("run", str(tmp_path)).train(
            student,
            dict(max_epochs=1, initial_lr=0.1, loss=LOSS),
            DataLoader(TensorDataset(images, labels), 8),
        )


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"teacher": None}, "teacher"),
        ({"student": None}, "student"),
        ({"model": nn.Identity()}, "model"),
        ({"kd_architecture": "other"}, "kd_architecture"),
        ({"run_teacher_on_eval": False}, "run_teacher_on_eval"),
        ({"kd_arch_params": {"adapter": nn.Identity()}}, "kd_arch_params.adapter"),
    ],
)
def test_errors_name_invalid_arguments(tmp_path, arguments, path):
    student, teacher = networks()
    with pytest.raises((ConfigError, UnknownNameError)) as error:
        KDTrainer("run", str(tmp_path)).train(**{"student": student, "teacher": teacher, **arguments})
    assert error.value.path == path


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


def test_the_teacher_is_read_before_training_and_not_by_the_constructor(tmp_path):
    run = runner(tmp_path)
    (tmp_path / "teacher.pth").unlink()
    with pytest.raises(CheckpointError, match=r"teacher\.pth"):
        run.train()


def test_the_teacher_is_read_before_validation_because_the_validation_loss_uses_it(tmp_path):
    run = runner(tmp_path)
    wanted = torch.load(tmp_path / "teacher.pth", weights_only=True)["net"]
    assert run.val()["KDLogitsLoss"] > 0
    torch.testing.assert_close(run.model.teacher[1].state_dict(), wanted, rtol=0, atol=0)


def test_a_resumed_run_reads_the_teacher_again(tmp_path):
    runner(tmp_path).train()
    run = runner(tmp_path, resume=True, train_cfg={"by_epoch": True, "max_epochs": 2})
    wanted = torch.load(tmp_path / "teacher.pth", weights_only=True)["net"]
    model = run.train()
    assert run.epoch == 2
    torch.testing.assert_close(model.teacher[1].state_dict(), wanted, rtol=0, atol=0)
