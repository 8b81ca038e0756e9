"""Two processes with SyncBN and half the batch each match one process with the whole batch.

In float64, the results agree far beyond float32's precision at each of 20 steps, so the only difference is rounding.
In float32, rounding alone changes some runs. PP-LiteSeg's global pooling leaves BatchNorm one value per image, so even
with one process, a float32 run differs from the float64 run by 1e-2 after 20 steps. In a ResNet, a ReLU input whose
sign changes through rounding causes a difference of 1e-5 or more at common learning rates. If nothing amplifies
rounding errors (in a smaller network, or with small steps), float32 results agree to 1e-6. For the same reason, the
float64 run of PP-LiteSeg has a moderate learning rate: at 0.02, rounding errors grow to 4e-8 within 16 steps and then
change the sign of a ReLU input.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from two_processes import run_in_two
from two_trainings import LossOfEachStep, train

from slipstream.model import Classifier, Segmentor, SyncBatchNorm
from slipstream.runner import Runner
from slipstream.zoo import MultiHeadCrossEntropy
from slipstream.zoo.resnet import BasicBlock, ResNet

pytestmark = pytest.mark.slow
CLASSES = 4


class Pictures(Dataset):
    """Random images with a label per image or per pixel.

    With labels per pixel, the first `ignored` rows are ignored or, with `uneven`, a different number of rows per image.
    """

    metainfo = dict(classes=tuple("abcd"))  # noqa: RUF012

    def __init__(self, size=16, count=40, dtype=torch.float32, pixels=False, ignored=4, uneven=False):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 3, size, size, generator=generator).to(dtype)
        shape = (count, size, size) if pixels else (count,)
        self.y = torch.randint(0, CLASSES, shape, generator=generator)
        if pixels:
            for index, target in enumerate(self.y):
                target[: index % size if uneven else ignored] = 255

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"inputs": self.x[index], "targets": self.y[index]}


class SmallSegmentation(nn.Module):
    """A network with four BatchNorms and an auxiliary head."""

    def __init__(self):
        super().__init__()
        widths = (3, 8, 16, 16)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in pairwise(widths)
        )
        self.head = nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, CLASSES, 1))
        self.aux = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        first = self.body[0](x)
        out = self.head(self.body[2](self.body[1](F.max_pool2d(first, 2))))
        out = F.interpolate(out, x.shape[-2:])
        return (out, self.aux(first)) if self.training else out


def resnet():
    return Classifier(ResNet(BasicBlock, (1, 1, 1, 1), CLASSES, small_input=True))


def segmentation():
    return Segmentor(SmallSegmentation(), MultiHeadCrossEntropy())


SGD, MODERATE_SGD, SLOW_SGD = (dict(type="SGD", lr=lr, momentum=0.9) for lr in (0.02, 1e-3, 2e-5))
ADAMW, SLOW_ADAMW = dict(type="AdamW", lr=1e-3), dict(type="AdamW", lr=2e-5, eps=1e-5)
PIXELS, DOUBLE = dict(pixels=True), dict(dtype=torch.float64)
EXACT, CLOSE = 1e-8, 1e-6
CASES = {
    "resnet, float32, SGD": (resnet, SLOW_SGD, {}, CLOSE),
    "segmentation, float32, SGD": (segmentation, SGD, PIXELS, CLOSE),
    "segmentation, float32, AdamW": (segmentation, SLOW_ADAMW, PIXELS, CLOSE),
    "segmentation, float64, AdamW": (segmentation, ADAMW, dict(PIXELS, **DOUBLE), EXACT),
}


def run(folder, world, case):
    """Return the loss of each of 20 steps and the final state."""
    make, optimizer, data, _ = CASES[case]
    torch.manual_seed(0)
    model = make().to(data.get("dtype"))
    losses = LossOfEachStep()
    runner = train(
        folder,
        world,
        model,
        Pictures(**data),
        max_epochs=4,
        optim_wrapper=dict(optimizer=optimizer),
        custom_hooks=[losses],
        cfg=dict(sync_bn=True),
    )
    kinds = {type(m) for m in runner.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    assert kinds == ({SyncBatchNorm} if world > 1 else {nn.BatchNorm2d})
    model = runner.model.module if world > 1 else runner.model
    return losses.losses, {name: value.clone() for name, value in model.state_dict().items()}


def trainings(folder):
    return {case: run(folder / str(index), 2, case) for index, case in enumerate(CASES)}


def measure(folder, world, pixels):
    """Validate on 23 images, which is not a multiple of the number of ranks or the batch size."""
    torch.manual_seed(0)
    loader = dict(
        dataset=Pictures(count=23, pixels=pixels),
        batch_size=4,
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    metric = dict(type="IoUMetric") if pixels else dict(type="Accuracy", topk=(1, 2))
    runner = Runner(
        (segmentation if pixels else resnet)(),
        str(folder),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=metric,
        launcher="pytorch" if world > 1 else "none",
        cfg=dict(sync_bn=True),
        log_level="ERROR",
    )
    return runner.val()


def metrics(folder):
    return [measure(folder, 2, pixels) for pixels in (False, True)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([trainings, metrics], tmp_path_factory.mktemp("equal"), timeout=120)


def both(answers, name):
    for answer in answers[name]:
        assert not isinstance(answer, str), answer
    return answers[name]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_match_one_process(answers, tmp_path, case):
    losses, weights = run(tmp_path, 1, case)
    tolerance = CASES[case][-1]
    assert len(losses) == 20
    assert len(set(losses)) == 20
    for two_losses, two_weights in (answer[case] for answer in both(answers, "trainings")):
        assert two_losses == pytest.approx(losses, rel=tolerance, abs=0)
        assert two_weights.keys() == weights.keys()
        for name, value in weights.items():
            scale = value.double().abs().max().clamp_min(1)
            difference = (two_weights[name].double() - value.double()).abs().max()
            assert difference <= 100 * tolerance * scale, name


@pytest.mark.parametrize("which", [0, 1], ids=["Accuracy", "IoUMetric"])
def test_metrics_of_an_uneven_dataset_match_one_process_exactly(answers, tmp_path, which):
    alone = measure(tmp_path, 1, bool(which))
    assert alone
    for answer in both(answers, "metrics"):
        assert answer[which] == alone
