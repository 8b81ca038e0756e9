import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.model import AveragePart, ExponentialMovingAverage
from slipstream.model.tasks import SlidingWindow, slide
from slipstream.optim import OptimWrapper
from slipstream.registry import MODELS
from slipstream.runner import Runner
from slipstream.step import EagerStep
from slipstream.step.graph import GraphStep
from slipstream.training.metrics import PixelAccuracy
from slipstream.training.network import SupervisedModel
from slipstream.zoo import models

CLASSES, IGNORE = 4, 4


class Pixels(nn.Module):
    """A network that returns logits for each pixel and, in training mode, an auxiliary output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x):
        logits = self.conv(x)
        return (logits, 2 * logits) if self.training else logits


class First(nn.Module):
    """Cross-entropy of the main output."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs[0], targets, ignore_index=IGNORE)


def batch(seed=0, size=2):
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(size, 3, 6, 5, generator=generator),
        "targets": torch.randint(0, CLASSES + 1, (size, 6, 5), generator=generator, dtype=torch.uint8),
    }


def model(**options):
    torch.manual_seed(0)
    return SupervisedModel(Pixels(), First(), **options)


def metrics():
    return [dict(type="IoU", num_classes=CLASSES + 1, ignore_index=IGNORE), PixelAccuracy(IGNORE)]


def plain_metrics(pairs):
    """Compute the metrics with NumPy, in a loop over the classes."""
    preds = np.concatenate([p.numpy().reshape(-1) for p, _ in pairs])
    targets = np.concatenate([t.numpy().reshape(-1).astype(np.int64) for _, t in pairs])
    preds, targets = preds[targets != IGNORE], targets[targets != IGNORE]
    ious = [
        ((preds == c) & (targets == c)).sum() / ((preds == c) | (targets == c)).sum() for c in range(CLASSES)
    ]
    return {"IoU": np.mean(ious), "PixelAccuracy": (preds == targets).mean()}


# ---- batches and modes ---------------------------------------------------------------------------------


def test_sliding_window_applies_only_to_evaluation():
    data, net = batch(), model()
    net.sliding_window = SlidingWindow(crop_size=(4, 4), stride=(2, 2))
    calls = []
    net.network.register_forward_hook(lambda _, args, __: calls.append(args[0].shape[-2:]))
    net.loss_step(data)
    assert calls == [(6, 5)]
    found = net.eval().val_step(data)["preds"]
    assert set(calls[1:]) == {(4, 4)}
    assert torch.equal(found, slide(net.network, data["inputs"], net.sliding_window).argmax(1))


# ---- pretrained weights --------------------------------------------------------------------------------


def test_init_weights_loads_pretrained_weights_once(tmp_path):
    source = models.get("resnet18_cifar", 3)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    config = dict(
        type="SupervisedModel",
        network=dict(type="resnet18_cifar", num_classes=3),
        pretrained=dict(checkpoint_path=str(tmp_path / "weights.pth"), strict_load="no_key_matching"),
    )
    net = MODELS.build(config)
    assert not torch.equal(net.network.fc.weight, source.fc.weight)
    net.init_weights()
    assert torch.equal(net.network.fc.weight, source.fc.weight)
    nn.init.zeros_(net.network.fc.weight)
    net.init_weights()
    assert not net.network.fc.weight.any()


# ---- training metrics ----------------------------------------------------------------------------------


def test_metrics_count_each_training_batch_and_reset_when_read():
    net, data = model(train_metrics=metrics()), [batch(seed) for seed in range(3)]
    with torch.no_grad():
        pairs = [(net.network.conv(d["inputs"]).argmax(1), d["targets"]) for d in data]
    for each in data:
        net.loss_step(each)
    net.eval().val_step(data[0])
    assert net.read_train_metrics() == pytest.approx(plain_metrics(pairs))
    net.train().loss_step(data[0])
    assert net.read_train_metrics() == pytest.approx(plain_metrics(pairs[:1]))
    assert not [key for key in net.state_dict() if "count" in key]


def train(step_of, data, ema=False, **wrapper):
    net = model(train_metrics=metrics())
    optim = OptimWrapper(optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **wrapper)
    eager = EagerStep(lambda batch: net.parse_losses(net.loss_step(batch)), net, optim)
    step = eager if step_of is None else step_of(net, optim, eager)
    if ema:
        average = ExponentialMovingAverage(net, momentum=0.5)
        optim.parts.append(AveragePart(average, net, lambda: optim.batches))
    seen = []
    for each in data:
        with torch.no_grad():
            seen.append((net.network.conv(each["inputs"]).argmax(1), each["targets"]))
        step(each)
    return net, seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"accumulative_counts": 2}, {"ema": True}])
def test_step_graph_counts_each_batch_once(backend, options):
    graphs = []

    def one_graph(net, optim, eager):
        def compiler(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        def refuse(error):
            raise error

        return GraphStep(
            eager.loss_of,
            net,
            optim,
            eager,
            compiler,
            refuse,
        )

    net, seen = train(one_graph, [batch(seed) for seed in range(5)], **options)
    assert graphs
    assert net.read_train_metrics() == pytest.approx(plain_metrics(seen))
    assert net.train_counts1[1] == 0


class Samples(torch.utils.data.Dataset):
    metainfo = {"classes": list("abcd"), "ignore_index": IGNORE}  # noqa: RUF012

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {key: value[0] for key, value in batch(index, 1).items()}


def run(folder, **changes):
    loader = dict(dataset=Samples(), batch_size=2, sampler=dict(type="DefaultSampler", shuffle=False))
    counted = changes.pop("train_metrics", metrics())
    config = dict(
        model=dict(type="SupervisedModel", network=Pixels(), loss=First(), train_metrics=counted),
        work_dir=str(folder),
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        custom_hooks=[dict(type="TrainMetricsHook")],
        **changes,
    )
    runner = Runner(**config)
    runner.train()
    return runner


@pytest.mark.parametrize(
    "speed", [None, dict(compile=dict(backend="eager", scope="step"), ema=dict(decay=0.5))]
)
def test_metrics_of_each_epoch_are_logged(tmp_path, caplog, speed):
    with caplog.at_level(logging.INFO):
        runner = run(tmp_path, speed=speed)
    net, data = runner.model, [batch(index, 1) for index in range(8)]
    with torch.no_grad():
        pairs = [(net.network.conv(d["inputs"]).argmax(1), d["targets"]) for d in data]
    wanted = plain_metrics(pairs)
    assert runner.message_hub.get_info("train/IoU") == pytest.approx(wanted["IoU"])
    assert runner.message_hub.get_info("train/PixelAccuracy") == pytest.approx(wanted["PixelAccuracy"])
    log = next(tmp_path.rglob("*.log")).read_text()
    for epoch in (1, 2):
        line = f"Epoch(train) [{epoch}]  train/IoU: {wanted['IoU']:.4f}  train/PixelAccuracy: "
        assert line + f"{wanted['PixelAccuracy']:.4f}" in log
        assert "cannot be compiled as one graph" not in log


# ---- invalid targets -----------------------------------------------------------------------------------
