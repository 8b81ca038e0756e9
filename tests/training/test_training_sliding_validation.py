"""The last validation and the validation of the averaged best models use sliding windows over whole images."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.dataset.sources.base import SegmentationDataset
from slipstream.hooks import Hook
from slipstream.model.tasks import SlidingWindow, slide
from slipstream.runner import Runner
from slipstream.training.callbacks import callback_hooks
from slipstream.training.network import SupervisedModel
from tiny_runs import loader, training

COLORS = [
    dict(type="SegStandardize", max_value=255),
    dict(type="SegNormalize", mean=[0.5] * 3, std=[0.2] * 3),
]
CENTER = dict(type="SegCropImageAndMask", crop_size=[16, 8], mode="center")
WINDOW = dict(crop_size=[16, 8], stride=[8, 8])


class Stripes(SegmentationDataset):
    """Six images of 24 x 12 pixels."""

    metainfo: ClassVar = dict(classes=("a", "b"), palette=[[0, 0, 0], [9, 9, 9]], ignore_index=None)

    def __len__(self):
        return 6

    def load(self, index):
        image = np.random.default_rng(index).integers(0, 256, (12, 24, 3), np.uint8)
        return image, (image[..., 0] > 127).astype(np.uint8)


class Wide(nn.Module):
    """A network with a receptive field so large that window borders change the output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 5, padding=2)

    def forward(self, x):
        return self.conv(x)


class Predictions(Hook):
    """A hook that records the predictions and images of each validation."""

    def __init__(self):
        self.passes = []

    def before_val(self, runner):
        self.passes.append(([], []))

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        images, preds = self.passes[-1]
        images.append(data_batch["inputs"].clone())
        preds.append(outputs["preds"])


def arguments(folder, entry, hooks=(), transforms=(CENTER, *COLORS), workers=0, epochs=2, **changes):
    data = dict(type=Stripes, transforms=list(transforms))
    return training(
        folder,
        **{
            "model": SupervisedModel(Wide()),
            "train_dataloader": loader(data, batch_size=3),
            "train_cfg": dict(by_epoch=True, max_epochs=epochs),
            "val_dataloader": loader(
                data, batch_size=3, shuffle=False, num_workers=workers, persistent_workers=workers > 0
            ),
            "val_cfg": {},
            "val_evaluator": dict(type="IoUMetric"),
            "custom_hooks": [*hooks, *callback_hooks([entry])],
            **changes,
        },
    )


def trained(folder, entry, **changes):
    seen = Predictions()
    runner = Runner(**arguments(folder, entry, hooks=[seen, *changes.pop("hooks", ())], **changes))
    runner.train()
    return runner, [tuple(map(torch.cat, both)) for both in seen.passes]


def by_hand(network, images):
    """Return predictions from sliding windows over whole, normalized images."""
    inputs = (images.float() / 255 - 0.5) / 0.2
    with torch.no_grad():
        return slide(network, inputs, SlidingWindow((16, 8), (8, 8))).argmax(1)


ENTRY = dict(SlidingWindowValidationCallback=dict(transforms_for_sliding_window=[], **WINDOW))


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_last_validation_uses_sliding_windows(tmp_path, workers):
    runner, passes = trained(tmp_path, ENTRY, workers=workers, epochs=3)
    assert [images.shape for images, _ in passes] == [(6, 3, 8, 16), (6, 3, 8, 16), (6, 3, 12, 24)]
    assert passes[-1][1].shape == (6, 12, 24)
    assert torch.equal(passes[-1][1], by_hand(runner.model.network, passes[-1][0]))
    whole = torch.stack([torch.from_numpy(Stripes().load(i)[0]).permute(2, 0, 1) for i in range(6)])
    assert torch.equal(passes[-1][0], whole)
    assert runner.model.sliding_window is None
    assert runner.val_dataloader.dataset[0]["inputs"].shape == (3, 8, 16)


def test_validation_outside_training_uses_sliding_windows(tmp_path):
    seen = Predictions()
    runner = Runner(**arguments(tmp_path, ENTRY, hooks=[seen]))
    runner.val()
    ((images, preds),) = seen.passes
    assert torch.equal(torch.cat(preds), by_hand(runner.model.network, torch.cat(images)))


# ---- invalid input ------------------------------------------------------------------------------------
