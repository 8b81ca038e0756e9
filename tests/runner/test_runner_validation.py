"""Validation on several loaders, losses beside metrics, and the mean losses of epochs, compared with plain loops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Runner
from slipstream.errors import ConfigError, ModelError
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from tiny_runs import Accuracy, assert_same, loader, samples, training, weights


def net():
    torch.manual_seed(7)
    return nn.Linear(4, 3).double()


class Own(BaseModel):
    """The same network as a `BaseModel`."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs, labels, mode="tensor"):
        logits = self.net(inputs)
        return {"loss_ce": F.cross_entropy(logits, labels)} if mode == "loss" else (logits, labels)


def data(count, seed=0):
    inputs, labels = samples(count, seed)
    return TensorDataset(inputs.double(), labels)


class Correct(Accuracy):
    """The fraction of correct predictions in pairs (outputs, targets)."""

    def process(self, data_batch, data_samples):
        outputs, targets = data_samples
        self.results.extend((outputs.argmax(1) == targets).double().tolist())

    def compute_metrics(self, results):
        return {"acc": sum(results) / len(results)}


LOADERS = dict(near=DataLoader(data(21), 8), far=dict(dataset=data(10, seed=5), batch_size=3))


def arguments(folder, **changes):
    evaluation = dict(val_dataloader=LOADERS, val_cfg={}, val_evaluator=["loss", dict(type=Correct)])
    own = isinstance(changes.get("model"), BaseModel)
    parts = dict(model=net(), **({} if own else dict(loss_fn=F.cross_entropy)), **evaluation)
    return {**training(folder, train_dataloader=loader(data(22), 8)), **parts, **changes}


def by_hand(dataset, model=None):
    inputs, labels = dataset.tensors
    with torch.no_grad():
        logits = (net() if model is None else model)(inputs)
    right = (logits.argmax(1) == labels).double().mean()
    return dict(loss=F.cross_entropy(logits, labels).item(), acc=right.item())


def expected():
    near, far = by_hand(data(21)), by_hand(data(10, seed=5))
    return {**{f"near/{k}": v for k, v in near.items()}, **{f"far/{k}": v for k, v in far.items()}}


@pytest.mark.parametrize("kind", ["plain", "own"])
@pytest.mark.parametrize("evaluator", ["list", "objects", "by name"])
def test_each_loader_has_its_own_losses_and_metrics(tmp_path, kind, evaluator):
    metrics = dict(
        list=["loss", dict(type=Correct)],
        objects=[Correct(), "loss"],
    )
    metrics["by name"] = dict(near=metrics["list"], far=["loss", Correct()])
    options = dict(model=Own()) if kind == "own" else {}
    runner = Runner(**arguments(tmp_path, val_evaluator=metrics[evaluator], **options))
    for _ in range(2):  # the state of an evaluation does not remain
        found = {name.replace("loss_ce", "loss"): value for name, value in runner.val().items()}
        found = {name: value for name, value in found.items() if name in expected()}
        assert found == pytest.approx(expected(), rel=1e-12)
    assert runner.val_loop.batches == 3 + 4


def test_loss_and_metric_of_one_loader_and_of_test_loaders(tmp_path):
    runner = Runner(**arguments(tmp_path, val_dataloader=LOADERS["near"]))
    assert runner.val() == pytest.approx(by_hand(data(21)), rel=1e-12)
    tests = dict(test_dataloader=LOADERS, test_cfg={}, test_evaluator="loss")
    found = Runner(**arguments(tmp_path, **tests)).test()
    assert found == pytest.approx({k: v for k, v in expected().items() if k.endswith("loss")}, rel=1e-12)


def test_model_that_returns_its_loss_has_metrics_too(tmp_path):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, inputs, labels=None):
            logits = self.net(inputs)
            return logits if labels is None else F.cross_entropy(logits, labels)

    runner = Runner(**arguments(tmp_path, model=Returns(), loss_fn="model"))
    assert runner.val() == pytest.approx(expected(), rel=1e-12)


def test_losses_beside_metrics_are_those_of_unchanged_batches(tmp_path):
    class InPlace(Own):
        def forward(self, inputs, labels, mode="tensor"):
            return super().forward(inputs.mul_(2.0).sub_(1.0), labels, mode)

    both = Runner(**arguments(tmp_path / "a", model=InPlace())).val()
    alone = Runner(**arguments(tmp_path / "b", model=InPlace(), val_evaluator="loss")).val()
    assert alone == {name: value for name, value in both.items() if "loss" in name}


def test_hooks_monitor_a_loader_and_see_its_batches(tmp_path):
    seen = []

    class Watch(Hook):
        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append((batch_idx, len(data_batch[0]), len(runner.val_dataloader.dataset)))

        def after_val_epoch(self, runner, metrics=None):
            seen.append(dict(metrics))

    runner = Runner(
        **arguments(
            tmp_path,
            default_hooks=dict(checkpoint=dict(save_best="far/loss"), logger=dict(interval=1)),
            custom_hooks=[
                Watch(),
                dict(type="EarlyStoppingHook", monitor="near/acc", stopping_threshold=0.0),
            ],
        )
    )
    runner.train()
    assert runner.epoch == 1
    assert seen[:-1] == [(0, 8, 21), (1, 8, 21), (2, 5, 21), (0, 3, 10), (1, 3, 10), (2, 3, 10), (3, 1, 10)]
    assert runner.message_hub.get_info("best_score/far/loss") == seen[-1]["far/loss"]
    assert (tmp_path / "best_far_loss_epoch_1.pth").is_file()
    assert runner.message_hub.get_scalar("val/near/loss").current() == seen[-1]["near/loss"]


@pytest.mark.parametrize("name", ["error_set", "auc"])
def test_the_name_of_a_loader_does_not_decide_which_values_are_better(tmp_path, name):
    loaders = {name: LOADERS["near"]}
    metric = "acc" if name == "error_set" else "loss"
    hook = dict(type="CheckpointHook", save_best=f"{name}/{metric}")
    runner = Runner(**arguments(tmp_path, val_dataloader=loaders, default_hooks=dict(checkpoint=hook)))
    runner.train()
    values = [float(v) for v in runner.message_hub.get_scalar(f"val/{name}/{metric}").data[0]]
    best = runner.message_hub.get_info(f"best_score/{name}/{metric}")
    assert best == (max if metric == "acc" else min)(values)


def test_torchmetrics_objects_and_collections(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = torchmetrics.classification
    metric = kinds.MulticlassAccuracy(num_classes=3, average="micro")
    collection = torchmetrics.MetricCollection(dict(top1=kinds.MulticlassAccuracy(3, average="micro")))
    found = Runner(**arguments(tmp_path, val_evaluator=[metric, collection, "loss"])).val()
    for name, values in dict(near=by_hand(data(21)), far=by_hand(data(10, seed=5))).items():
        assert found[f"{name}/MulticlassAccuracy"] == pytest.approx(values["acc"])
        assert found[f"{name}/top1"] == pytest.approx(values["acc"])
        assert found[f"{name}/loss"] == pytest.approx(values["loss"])


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        (dict(val_evaluator=dict(near="loss", fur="loss")), "val_evaluator", r"\['near', 'far'\]"),
        (dict(val_evaluator="los"), "val_evaluator", "or 'loss', not 'los'"),
        (
            dict(val_dataloader=dict(near=LOADERS["near"], far=dict(dataset=data(3), batch_sze=1))),
            "val_dataloader.far",
            "batch_size",
        ),
        (dict(val_evaluator=["loss", "loss"]), "", "two metrics report 'loss'"),
    ],
)
def test_errors_name_the_loader(tmp_path, options, path, message):
    runner = Runner(**arguments(tmp_path, **options))
    with pytest.raises(ConfigError, match=message) as caught:
        runner.val()
    assert caught.value.path == path


def test_loss_function_uses_the_predictions_of_the_metrics(tmp_path):
    calls = []
    model = net()
    model.register_forward_hook(lambda *_: calls.append(1))
    Runner(**arguments(tmp_path, model=model)).val()
    assert len(calls) == 3 + 4


@pytest.mark.parametrize("kind", [list, dict])
def test_loaders_can_be_numbered(tmp_path, kind):
    near, far = DataLoader(data(21), 8), DataLoader(data(10, seed=5), 4)
    loaders = [near, far] if kind is list else {0: near, 1: far}
    found = Runner(**arguments(tmp_path, val_dataloader=loaders, val_evaluator="loss")).val()
    assert found == pytest.approx({"0/loss": expected()["near/loss"], "1/loss": expected()["far/loss"]})


def test_hooks_without_validation_log_a_warning(tmp_path):
    none = dict(val_dataloader=None, val_cfg=None, val_evaluator=None, log_level="WARNING")
    hooks = dict(
        default_hooks=dict(checkpoint=dict(save_best="loss")),
        custom_hooks=[dict(type="EarlyStoppingHook", monitor="acc")],
        param_scheduler=dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater"),
    )
    Runner(**arguments(tmp_path, **none, **hooks)).train()
    (log,) = tmp_path.rglob("*.log")
    for name in ("CheckpointHook: 'loss'", "EarlyStoppingHook: 'acc'", "ReduceOnPlateauLR"):
        assert f"{name} has no effect, because the Runner has no validation" in log.read_text()


# ---- means of epochs ----------------------------------------------------------------------------------


class Losses(Hook):
    """A hook that records the losses of all samples of each epoch, and may stop the run."""

    priority = "LOWEST"

    def __init__(self, stop=None):
        self.epochs, self.stop = {}, stop

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.epochs.setdefault(runner.epoch, []).append((float(outputs["loss"]), len(data_batch[0])))
        if runner.iter + 1 == self.stop:
            runner.save_checkpoint(runner.work_dir, "stopped.pth", by_epoch=False)

    def means(self):
        return [
            sum(loss * size for loss, size in epoch) / sum(size for _, size in epoch)
            for epoch in self.epochs.values()
        ]


def epoch_means(runner):
    return [float(value) for value in runner.message_hub.get_scalar("train_epoch/loss").data[0]]


def test_mean_losses_of_epochs_are_weighted_by_samples_and_resume(tmp_path):
    hook = Losses(stop=5)  # within the second epoch of three batches, of 8, 8 and 6 samples
    whole = Runner(**arguments(tmp_path / "whole", custom_hooks=[hook]))
    whole.train()
    assert [size for _, size in hook.epochs[1]] == [8, 8, 6]
    assert epoch_means(whole) == pytest.approx(hook.means(), rel=1e-6)
    resumed = Runner(**arguments(tmp_path / "resumed", resume=tmp_path / "whole" / "stopped.pth"))
    resumed.train()
    assert_same(weights(whole), weights(resumed))
    assert epoch_means(resumed) == epoch_means(whole)


def test_mean_losses_are_logged_after_each_epoch(tmp_path, capfd):
    runner = Runner(**arguments(tmp_path, log_level="INFO"))
    runner.train()
    lines = [line for line in capfd.readouterr().out.splitlines() if "] mean" in line]
    assert [line.partition("Epoch(train) ")[2] for line in lines] == [
        f"[{epoch}] mean  loss: {value:.4f}" for epoch, value in enumerate(epoch_means(runner), 1)
    ]


def test_each_loader_writes_its_predictions_to_its_own_file(tmp_path):
    dump = dict(type="DumpResults", out_file_path=str(tmp_path / "out.pt"))
    Runner(**arguments(tmp_path, val_evaluator=[dump])).val()
    sizes = {path.stem: len(torch.load(path, weights_only=True)) for path in tmp_path.glob("*.pt")}
    assert sizes == {"out_near": 21, "out_far": 10}
    alone = Runner(**arguments(tmp_path / "b", val_evaluator=[dump], val_dataloader=DataLoader(data(21), 8)))
    alone.val()
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)) == 21


class RequiresLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs, labels):
        return {"loss": F.cross_entropy(self.net(inputs), labels)}


def test_predictions_of_a_model_that_requires_labels_are_refused_with_a_remedy(tmp_path):
    parts = dict(model=RequiresLabels(), loss_fn="model")
    runner = Runner(**arguments(tmp_path, val_evaluator=dict(type=Correct), **parts))
    with pytest.raises(
        ModelError, match=r"RequiresLabels is called without the targets.*'labels'.*default None"
    ):
        runner.val()
    Runner(**arguments(tmp_path / "b", val_evaluator="loss", **parts)).val()
