"""Tests of transforms of other libraries, and of functions, in `transforms=[...]`."""

import functools
from typing import ClassVar

import numpy as np
import pytest
import torch

from slipstream.dataset import (
    ConcatDataset,
    SampleIndex,
    SegmentationDataset,
    SegRandomFlip,
    SegStandardize,
    build_dataloader,
)
from slipstream.dataset.sources.base import ImageDataset
from slipstream.dataset.transforms.image_transforms import (
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    ToTensor,
)
from slipstream.errors import ConfigError, DataError
from torchvision_operators import import_torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 12, 16, 3), np.uint8)
MASKS = PIXELS[..., 0] % 3


class Masked(SegmentationDataset):
    metainfo: ClassVar = dict(classes=("a", "b", "c"), palette=[[0, 0, 0]] * 3, ignore_index=255)

    def __len__(self):
        return len(PIXELS)

    def load(self, index):
        return PIXELS[index], MASKS[index]


class Labeled(ImageDataset):
    def __len__(self):
        return len(PIXELS)

    def load(self, index):
        return {"inputs": PIXELS[index].transpose(2, 0, 1), "targets": index}


def normalized(image):
    return torch.from_numpy(
        (image.transpose(2, 0, 1) / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    ).float()


@pytest.fixture
def v2():
    return import_torchvision().transforms.v2


@pytest.fixture
def albumentations():
    return pytest.importorskip("albumentations")


def repeatable(dataset):
    """Return sample 1 of epoch 0, which is the same in a new loader, in a worker process, and in another order."""
    samples = []
    for order, workers in (([0, 1], 0), ([1, 3], 0), ([2, 1], 1)):
        options = dict(batch_size=1, num_workers=workers, multiprocessing_context="fork" if workers else None)
        loader = build_dataloader(
            dict(dataset=dataset(), batch_sampler=[[i] for i in order], **options), 5, "loader", True
        )
        samples.append(list(loader)[order.index(1)])
    for sample in samples[1:]:
        torch.testing.assert_close(sample, samples[0], rtol=0, atol=0)
    return {key: value[0] for key, value in samples[0].items()}


def find(part, whole):
    """Return the positions and directions at which a crop with its channels last occurs in an array."""
    height, width = part.shape[:2]
    return [
        (y, x, flip) for flip in (1, -1) for y in range(13 - height) for x in range(17 - width)
        if np.array_equal(whole[:, ::flip][y : y + height, x : x + width], part)
    ]  # fmt: skip


@pytest.mark.parametrize("library", ["albumentations", "v2"])
def test_images_and_masks_are_moved_together_and_depend_on_seed_epoch_and_index(library, request):
    module = request.getfixturevalue(library)
    flip = "HorizontalFlip" if library == "albumentations" else "RandomHorizontalFlip"
    crop = module.RandomCrop(8, 10) if library == "albumentations" else module.RandomCrop((8, 10))

    def dataset(*rest):
        return Masked([module.Compose([crop, getattr(module, flip)(p=0.5)]), *rest])

    sample = repeatable(dataset)
    assert sample["inputs"].dtype == sample["targets"].dtype == torch.uint8
    places = find(sample["inputs"].permute(1, 2, 0).numpy(), PIXELS[1])
    assert places
    assert places == find(sample["targets"].numpy(), MASKS[1])
    mixed = repeatable(
        lambda: dataset(SegRandomFlip(1.0), SegStandardize())
    )  # Slipstream's transforms may follow
    assert torch.equal(mixed["inputs"], sample["inputs"].flip(-1))
    assert torch.equal(mixed["targets"], sample["targets"].flip(-1))
    assert mixed["device_params"].shape == (6,)


def normalizations(library, module):
    if library == "albumentations":
        pytest.importorskip("cv2")
        from albumentations.pytorch import ToTensorV2

        return [[module.Normalize(MEAN, STD)], [module.Compose([module.Normalize(MEAN, STD), ToTensorV2()])]]
    float_images = module.ToDtype(torch.float32, scale=True)
    return [
        [module.Compose([float_images, module.Normalize(MEAN, STD)])],
        [float_images, module.Normalize(MEAN, STD)],
    ]


@pytest.mark.parametrize("library", ["albumentations", "v2"])
def test_other_libraries_may_normalize(library, request):
    for transforms in normalizations(library, request.getfixturevalue(library)):
        sample = Masked([SegRandomFlip(0.0), *transforms])[1]
        torch.testing.assert_close(sample["inputs"], normalized(PIXELS[1]))
        assert torch.equal(sample["targets"], torch.from_numpy(MASKS[1]))
        torch.testing.assert_close(Labeled(transforms)[1]["inputs"], normalized(PIXELS[1]))
        with pytest.raises(ConfigError, match="SegStandardize requires uint8 images and masks"):
            Masked([*transforms, SegStandardize()])[1]
        with pytest.raises(DataError, match="ToTensor requires uint8 images"):
            Labeled([*transforms, ToTensor(), Normalize(MEAN, STD)])[1]
        both = ConcatDataset([Masked(transforms), Masked()], ignore_keys="palette")
        with pytest.raises(DataError, match="mixes samples with and without"):
            list(build_dataloader(dict(dataset=both, batch_size=8), 0, "loader", True))


def test_first_transforms_of_torchvision_change_images_only(v2):
    first = import_torchvision().transforms
    compose = first.Compose([first.CenterCrop(8), first.ToTensor(), first.Normalize(MEAN, STD)])
    expected = normalized(PIXELS[1][2:10, 4:12])
    torch.testing.assert_close(Labeled([compose])[1]["inputs"], expected)
    torch.testing.assert_close(
        Labeled([RandomHorizontalFlip(0.0), *compose.transforms])[1]["inputs"], expected
    )
    sample = Labeled([first.CenterCrop(8), CenterCrop(4), ToTensor()])[1]
    assert np.array_equal(sample["inputs"], PIXELS[1][4:8, 6:10].transpose(2, 0, 1))
    with pytest.raises(ConfigError, match="Compose ignores masks; use torchvision"):
        Masked([compose])[1]


def inverted(sample):
    return {**sample, "image": 255 - sample["image"]}


def darkened(sample, rng):
    return {**sample, "image": sample["image"] // np.uint8(2 + rng.integers(1))}


class Module(torch.nn.Module):
    def forward(self, image):
        return 255 - image


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (inverted, lambda image: 255 - image),
        (darkened, lambda image: image // 2),
        (lambda sample, rng=None: inverted(sample) if rng else sample, lambda image: 255 - image),
        (lambda sample, factor=2: darkened(sample, np.random.default_rng()), lambda image: image // 2),
        (functools.partial(darkened, rng=np.random.default_rng()), lambda image: image // 2),
    ],
)
def test_functions_take_a_sample_and_optionally_a_generator(function, expected):
    sample = Masked([function, SegStandardize()])[SampleIndex(1, 0, 0)]
    assert np.array_equal(sample["inputs"], expected(PIXELS[1]).transpose(2, 0, 1))


def test_functions_of_an_image():
    for function in (lambda image: 255 - image, lambda image, rng: 255 - image, Module()):
        assert np.array_equal(Labeled([function])[1]["inputs"], 255 - PIXELS[1].transpose(2, 0, 1))
