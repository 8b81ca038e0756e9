"""Tests of color jitter and normalization on the device, compared with independent references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators import DEVICE, no_waiting
from slipstream.dataset import (
    ConcatDataset,
    SampleIndex,
    SegColorJitter,
    SegConvertToTensor,
    SegCropImageAndMask,
    SegmentationDataset,
    SegNormalize,
    SegPadShortToCropSize,
    SegRandomFlip,
    SegRandomRescale,
    SegStandardize,
    apply_device_transforms,
    apply_transforms,
    build_dataloader,
)
from slipstream.dataset.transforms.device_transforms import transform_images
from slipstream.errors import DataError
from slipstream.zoo.street_scenes import StreetScenes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER = SegColorJitter(0.5, 0.5, 0.5)
TAIL = [SegStandardize(255), SegNormalize(MEAN, STD), SegConvertToTensor()]
RECIPE = [
    JITTER,
    SegRandomFlip(0.5),
    SegRandomRescale((0.25, 1.75)),
    SegPadShortToCropSize((24, 16), 19),
    SegCropImageAndMask((24, 16), "random"),
    *TAIL,
]


def make(width=30, height=20, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"image": image, "mask": rng.integers(0, 19, (height, width), dtype=np.uint8)}


def batch_of(transforms, seeds, **kwargs):
    samples = [apply_transforms(transforms, make(seed=s, **kwargs), np.random.default_rng(s)) for s in seeds]
    return torch.utils.data.default_collate(samples)


def jittered(image, changes):
    """Apply torchvision's formulas to an image of shape (..., 3) in float64."""
    image = np.asarray(image, float)
    for kind, factor in changes:
        gray = image @ [0.299, 0.587, 0.114]
        other = {0: 0.0, 1: gray.mean() if gray.size else 0.0, 2: gray[..., None]}[kind]
        image = np.clip(factor * image + (1 - factor) * other, 0, 255)
    return image


FACTORS = st.floats(0, 2, width=32)
CHANGES = st.permutations([0, 1, 2]).flatmap(
    lambda kinds: st.lists(FACTORS, max_size=3).map(lambda factors: list(zip(kinds, factors, strict=False)))
)


class Fixed(SegColorJitter):
    """A color jitter with fixed changes."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def draw(self, rng):
        return self.changes


@given(changes=CHANGES, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_stages_follow_the_torchvision_formulas_in_the_order_of_each_sample(changes, seed):
    plain = batch_of([], [seed, seed + 1])["inputs"]
    params = [
        batch_of([Fixed(order)], [seed])["device_params"][0] for order in (changes, list(reversed(changes)))
    ]
    found = transform_images(plain, torch.stack(params)).permute(0, 2, 3, 1).numpy()
    for image, order, result in zip(plain, (changes, reversed(changes)), found, strict=True):
        np.testing.assert_allclose(result, jittered(image.permute(1, 2, 0).numpy(), order), atol=2e-3)


def test_jitter_matches_pillow_with_the_same_draws_up_to_rounding():
    for seed in range(8):
        found = apply_device_transforms(batch_of([JITTER], [seed]))["inputs"][0].permute(1, 2, 0).numpy()
        expected = JITTER(make(seed=seed), np.random.default_rng(seed))["image"].astype(float)
        assert np.abs(found - expected).mean() < 2


def test_padding_keeps_its_color_and_is_excluded_from_the_mean():
    pad = SegPadShortToCropSize((40, 28), 19, fill_image=(10, 20, 30), padding_mode="random")
    for seed, flip in ((0, 0.0), (1, 1.0)):
        transforms = [Fixed([(1, 0.3)]), pad, SegRandomFlip(flip)]
        batch = batch_of(transforms, [seed])
        inside = batch["targets"][0].numpy() != 19
        found = apply_device_transforms(batch)["inputs"][0].permute(1, 2, 0).numpy()
        assert (found[~inside] == [10, 20, 30]).all()
        picture = batch["inputs"][0].permute(1, 2, 0).numpy()[inside]
        assert 0 < inside.sum() < inside.size
        np.testing.assert_allclose(found[inside], jittered(picture, [(1, 0.3)]), atol=1e-3)


@pytest.mark.parametrize(
    "tail", [TAIL, TAIL[:2], [SegNormalize([120, 110, 100], [60, 55, 50])], [SegStandardize()]]
)
def test_normalization_matches_transforms_applied_one_by_one(tail):
    batch = batch_of(tail, [0, 1])
    assert batch["inputs"].dtype == torch.uint8
    found = apply_device_transforms(batch)["inputs"]
    assert found.dtype == torch.float32
    for seed in (0, 1):
        sample = make(seed=seed)
        for transform in tail:
            sample = transform(sample, None)
        expected = sample["image"].transpose(2, 0, 1)
        np.testing.assert_allclose(found[seed].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [6, 13, 19])
def test_transform_images_compiles_without_graph_breaks(length):
    torch._dynamo.reset()
    inputs = torch.randint(0, 256, (2, 3, 8, 10), dtype=torch.uint8)
    params = torch.rand(2, length)
    params[:, :4] = torch.tensor([2.0, 1.0, 9.0, 7.0]) if length > 6 else params[:, :4]
    compiled = torch.compile(transform_images, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs, params), transform_images(inputs, params))


@pytest.mark.gpu
def test_accelerator_runs_without_synchronization_and_matches_cpu():
    batch = batch_of(RECIPE, range(4))
    on_device = {key: value.to(DEVICE) for key, value in batch.items()}
    with no_waiting():
        found = apply_device_transforms(on_device)["inputs"]
    torch.testing.assert_close(found.cpu(), apply_device_transforms(batch)["inputs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("collate", ["default_collate", "pseudo_collate"])
@pytest.mark.parametrize("first", [[], ["SegStandardize"], ["SegColorJitter"]])
def test_batches_with_mixed_device_transforms_raise_an_error(first, collate):
    def scenes(names):
        return StreetScenes((32, 64), 2, transforms=[{"type": name} for name in names])

    mixed = ConcatDataset([scenes(first), scenes(["SegColorJitter", "SegStandardize"])])
    cfg = {"dataset": mixed, "batch_size": 4, "collate_fn": collate}
    loader = build_dataloader(cfg, 0, "train_dataloader", True)
    with pytest.raises(DataError, match=r"a batch mixes samples .* in all datasets"):
        next(iter(loader))


# ---- order of transforms ----------------------------------------------------------------------


class Noise(SegmentationDataset):
    metainfo = {"classes": ("a", "b"), "palette": [[0, 0, 0], [9, 9, 9]], "ignore_index": 255}  # noqa: RUF012

    def __len__(self):
        return 4

    def load(self, index):
        sample = make(seed=index)
        return sample["image"], sample["mask"]


def test_colors_depend_only_on_seed_epoch_and_index():
    dataset = Noise(RECIPE)
    one, again = dataset[SampleIndex(1, 7, 2)], Noise(RECIPE)[SampleIndex(1, 7, 2)]
    assert all(torch.equal(one[key], again[key]) for key in ("inputs", "targets", "device_params"))
    others = [dataset[SampleIndex(*other)]["device_params"] for other in ((1, 8, 2), (1, 7, 3), (2, 7, 2))]
    assert not any(torch.equal(one["device_params"], other) for other in others)
    key = np.array([7, (2 * 0x9E3779B97F4A7C15 + 1) % 2**64], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key))
    rng.permutation(3)
    factors = [rng.uniform(0.5, 1.5) for _ in range(3)]
    np.testing.assert_allclose(one["device_params"][4:13:3].numpy(), factors, rtol=1e-6)
    rest = apply_transforms(RECIPE[1:5], make(seed=1), rng)
    assert all(torch.equal(one[key], rest[key]) for key in ("inputs", "targets"))
