import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.errors import DataError
from slipstream.model import Classifier, ImgDataPreprocessor, Segmentor
from slipstream.registry import MODELS


class Grid(nn.Module):
    """A network that returns logits at 1/`stride` of the input resolution, and an auxiliary output in training mode."""

    def __init__(self, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.stride = stride

    def forward(self, x):
        logits = self.conv(x)[..., :: self.stride, :: self.stride]
        return (logits, 2 * logits) if self.training else logits


class Summed(nn.Module):
    def forward(self, outputs, targets):
        return {f"loss_{i}": F.cross_entropy(output, targets) for i, output in enumerate(outputs)}


def batch(height=6, width=5):
    torch.manual_seed(0)
    return {
        "inputs": torch.rand(2, 3, height, width),
        "targets": torch.randint(0, 4, (2, height, width), dtype=torch.uint8),
    }


def test_segmentor_accepts_uint8_targets_and_returns_the_loss_of_every_output():
    data, model = batch(), Segmentor(Grid(), Summed())
    losses = model.loss_step(data)
    logits, targets = model.network.conv(data["inputs"]), data["targets"].long()
    torch.testing.assert_close(losses["loss_0"], F.cross_entropy(logits, targets))
    torch.testing.assert_close(losses["loss_1"], F.cross_entropy(2 * logits, targets))


@pytest.mark.parametrize("training", [True, False])
def test_segmentor_predicts_class_ids_from_the_main_output(training):
    data, model = batch(), Segmentor(Grid()).train(training)
    out = model.val_step(data)
    logits = model.network.conv(data["inputs"])
    assert torch.equal(out["preds"], logits.argmax(1))
    assert out["preds"].dtype == out["targets"].dtype == torch.int64
    assert torch.equal(out["targets"], data["targets"].long())


def test_segmentor_without_targets_predicts_but_raises_an_error_for_the_loss():
    data, model = batch(), Segmentor(Grid()).eval()
    assert set(model.val_step({"inputs": data["inputs"]})) == {"preds"}
    with pytest.raises(DataError, match="no 'targets'"):
        model.loss_step({"inputs": data["inputs"]})


def test_loss_excludes_the_padding_of_the_preprocessor():
    data = batch(6, 5)
    model = Segmentor(Grid(), Summed(), ImgDataPreprocessor(pad_size_divisor=4))
    wanted = F.cross_entropy(model.network.conv(data["inputs"]), data["targets"].long())
    torch.testing.assert_close(model.loss_step(data)["loss_0"], wanted)


def test_classifier_returns_cross_entropy_logits_and_targets():
    x, targets = torch.randn(5, 7), torch.tensor([0, 1, 2, 0, 1])
    model = Classifier(nn.Linear(7, 3))
    logits = model.network(x)
    data = {"inputs": x, "targets": targets}
    torch.testing.assert_close(model.loss_step(data)["loss"], F.cross_entropy(logits, targets))
    out = model.val_step(data)
    torch.testing.assert_close(out["preds"], logits.detach())
    assert torch.equal(out["targets"], targets)
    assert set(model.val_step({"inputs": x})) == {"preds"}
    torch.testing.assert_close(model(x), logits)
    with pytest.raises(DataError, match="no 'targets'"):
        model.loss_step({"inputs": x})


def test_network_loss_and_preprocessor_are_built_from_configurations():
    model = MODELS.build(
        dict(
            type="Classifier",
            network=dict(type="Linear", in_features=2, out_features=3),
            loss=dict(type="CrossEntropyLoss", label_smoothing=0.5),
            data_preprocessor=dict(type="BaseDataPreprocessor"),
        )
    )
    assert model.network.out_features == 3
    assert model.loss.label_smoothing == 0.5


# ---- targets that are not classes ------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user-defined loss without `takes_class_ids`, so its targets are not checked before the call."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def wrong(*values):
    """Return a batch of four samples. The targets of the third sample contain `values`."""
    targets = torch.zeros(4, 2, 2, dtype=torch.long)
    targets[2].view(-1)[: len(values)] = torch.tensor(values)
    return {"inputs": torch.zeros(4, 3, 2, 2), "targets": targets}


@pytest.mark.parametrize(
    ("loss", "values", "message"),
    [
        (
            nn.CrossEntropyLoss(ignore_index=255),
            (4, 7, -1, 255),
            r"classes: -1, 4, 7 \(first in sample 2 of the batch\); the classes are 0 to 3, and the loss ignores 255",
        ),
        (
            nn.CrossEntropyLoss(),
            (255,),
            r"network's classes: 255 .* ignores -100.*num_classes.*map.*ignore_index",
        ),
        (nn.NLLLoss(), (4,), "network's classes: 4 "),
        (dict(type="CrossEntropy"), (-1,), "network's classes: -1 "),
        (dict(type="MultiHeadCrossEntropy"), (200,), "network's classes: 200 .* ignores 255"),
        (dict(type="DiceCEEdgeLoss", num_classes=4), (4,), "network's classes: 4 "),
        (Own(), (4,), "network's classes: Target 4 is out of bounds"),
    ],
)
def test_error_names_a_target_that_is_not_a_class(loss, values, message):
    task = Segmentor(nn.Conv2d(3, 4, 1), loss)
    with pytest.raises(DataError, match=message):
        task.loss_step(wrong(*values))


def test_check_adds_no_graph_break_and_no_check_to_a_compiled_loss():
    task = Segmentor(nn.Conv2d(3, 4, 1), nn.CrossEntropyLoss(ignore_index=255))
    compiled = torch.compile(task.loss_step, backend="eager", fullgraph=True)
    assert compiled(wrong(255))["loss"].isfinite()
    assert not task._checked_labels
    assert task.loss_step(wrong(255))["loss"].isfinite()
    assert task._checked_labels
