"""Colours and normalisation on the device: the definition, independently computed; and what a data set sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from slipstream.apps.street_scenes import StreetScenes
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
    SegRescale,
    SegStandardize,
    apply_device_transforms,
    apply_transforms,
    build_dataloader,
)
from slipstream.dataset.transforms.device_transforms import check_alike, finish
from slipstream.errors import BuildError, ConfigError, DataError
from slipstream.registry import TRANSFORMS

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
    """The colours of (..., 3) in float64, by the formulas as they stand in torchvision's documentation."""
    image = np.asarray(image, float)
    for kind, factor in changes:
        grey = image @ [0.299, 0.587, 0.114]
        other = {0: 0.0, 1: grey.mean() if grey.size else 0.0, 2: grey[..., None]}[kind]
        image = np.clip(factor * image + (1 - factor) * other, 0, 255)
    return image


FACTORS = st.floats(0, 2, width=32)
CHANGES = st.permutations([0, 1, 2]).flatmap(
    lambda kinds: st.lists(FACTORS, max_size=3).map(lambda factors: list(zip(kinds, factors, strict=False)))
)


class Fixed(SegColorJitter):
    """A jitter whose changes are given."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def draw(self, rng):
        return self.changes


@given(changes=CHANGES, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_stages_are_torchvisions_formulas_in_each_samples_own_order(changes, seed):
    plain = batch_of([], [seed, seed + 1])["inputs"]
    programs = [batch_of([Fixed(order)], [seed])["finish"][0] for order in (changes, list(reversed(changes)))]
    found = finish(plain, torch.stack(programs)).permute(0, 2, 3, 1).numpy()
    for image, order, result in zip(plain, (changes, reversed(changes)), found, strict=True):
        np.testing.assert_allclose(result, jittered(image.permute(1, 2, 0).numpy(), order), atol=2e-3)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_each_stage_is_within_two_levels_of_pillows(kind, factor):
    """Pillow rounds the grey values and cuts off what is behind the point, so each stage may differ a little."""
    batch = batch_of([Fixed([(kind, factor)])], [3])
    enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[kind]
    expected = np.asarray(enhancer(Image.fromarray(make(seed=3)["image"])).enhance(factor), float)
    found = apply_device_transforms(batch)["inputs"][0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, expected, atol=2)


def test_the_whole_jitter_is_that_of_pillow_with_the_same_draws_but_for_rounding():
    for seed in range(8):
        found = apply_device_transforms(batch_of([JITTER], [seed]))["inputs"][0].permute(1, 2, 0).numpy()
        expected = JITTER(make(seed=seed), np.random.default_rng(seed))["image"].astype(float)
        assert np.abs(found - expected).mean() < 2


def test_padding_keeps_its_colour_and_does_not_count_in_the_mean():
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


def test_a_crop_that_holds_padding_only_is_finite():
    transforms = [
        Fixed([(1, 0.3)]),
        SegPadShortToCropSize((90, 20), 19),
        SegCropImageAndMask((5, 20), "random"),
    ]
    batch = batch_of(transforms, range(30))
    assert (batch["targets"] == 19).flatten(1).all(1).any()
    assert apply_device_transforms(batch)["inputs"].isfinite().all()


@pytest.mark.parametrize(
    "tail", [TAIL, TAIL[:2], [SegNormalize([120, 110, 100], [60, 55, 50])], [SegStandardize()]]
)
def test_normalisation_is_what_the_transforms_are_one_by_one(tail):
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


def test_standardise_and_normalise_are_the_usual_numbers():
    expected = (make()["image"] / 255 - np.array(MEAN)) / np.array(STD)
    found = apply_device_transforms(batch_of(TAIL, [0]))["inputs"][0]
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("transforms", "length"), [([JITTER], 13), (TAIL, 6), (RECIPE, 19), ([SegRescale(0.5)], None)]
)
def test_the_programs_length_says_what_it_holds(transforms, length):
    sample = apply_transforms(transforms, make(), np.random.default_rng(0))
    assert (list(sample["finish"].shape) if length else sample.get("finish")) == (
        [length] if length else None
    )
    if length:
        assert sample["finish"].dtype == torch.float32
    assert sample["inputs"].dtype == sample["targets"].dtype == torch.uint8


def test_finishing_leaves_the_batch_as_it_was_and_removes_the_program():
    for dtype in (torch.uint8, torch.float32):
        batch = batch_of(RECIPE, [0, 1])
        batch["inputs"] = batch["inputs"].to(dtype)
        before = {key: value.clone() for key, value in batch.items()}
        done = apply_device_transforms(batch)
        assert sorted(done) == ["inputs", "targets"]
        assert done["inputs"].shape == batch["inputs"].shape
        assert all(torch.equal(batch[key], before[key]) for key in before)


def test_a_batch_without_a_program_passes_through():
    batch = {"inputs": torch.zeros(2, 4), "other": "x"}
    assert apply_device_transforms(batch) == batch


def test_images_of_different_sizes_are_finished_one_by_one():
    batches = [batch_of(RECIPE[:3] + TAIL, [seed], width=20 + seed) for seed in (0, 5)]
    listed = {key: [batch[key][0] for batch in batches] for key in ("inputs", "targets", "finish")}
    done = apply_device_transforms(listed)
    for found, batch in zip(done["inputs"], batches, strict=True):
        torch.testing.assert_close(found, apply_device_transforms(batch)["inputs"][0])


@pytest.mark.parametrize(("inputs", "program"), [((2, 3, 4, 4), (2, 7)), ((2, 1, 4, 4), (2, 13))])
def test_what_is_no_program_is_refused(inputs, program):
    with pytest.raises(DataError, match=r"'finish' holds programs of length .* SegmentationDataset"):
        finish(torch.zeros(inputs), torch.zeros(program))


@pytest.mark.parametrize("length", [6, 13, 19])
def test_it_is_one_graph_without_a_break(length):
    torch._dynamo.reset()
    inputs = torch.randint(0, 256, (2, 3, 8, 10), dtype=torch.uint8)
    program = torch.rand(2, length)
    program[:, :4] = torch.tensor([2.0, 1.0, 9.0, 7.0]) if length > 6 else program[:, :4]
    compiled = torch.compile(finish, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs, program), finish(inputs, program))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_nothing_waits_and_the_numbers_are_the_cpus():
    batch = batch_of(RECIPE, range(4))
    on_device = {key: value.cuda() for key, value in batch.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = apply_device_transforms(on_device)["inputs"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), apply_device_transforms(batch)["inputs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("collate", ["default_collate", "pseudo_collate"])
@pytest.mark.parametrize("first", [[], ["SegStandardize"], ["SegColorJitter"]])
def test_samples_that_are_to_be_finished_differently_are_no_batch(first, collate):
    def scenes(names):
        return StreetScenes((32, 64), 2, transforms=[{"type": name} for name in names])

    mixed = ConcatDataset([scenes(first), scenes(["SegColorJitter", "SegStandardize"])])
    cfg = {"dataset": mixed, "batch_size": 4, "collate_fn": collate}
    loader = build_dataloader(cfg, 0, "train_dataloader", True)
    with pytest.raises(
        DataError, match=r"some change colours or normalise .* end all their transforms alike"
    ):
        next(iter(loader))


def test_a_word_of_the_users_own_that_is_no_program_is_no_matter():
    check_alike([{"finish": 3, "inputs": 0}, {"finish": "line", "inputs": 0}, (1, 2)])


# ---- which transforms may stand where -------------------------------------------------------------------


class Noise(SegmentationDataset):
    metainfo = {"classes": ("a", "b"), "palette": [[0, 0, 0], [9, 9, 9]], "ignore_index": 255}  # noqa: RUF012

    def __len__(self):
        return 4

    def load(self, index):
        sample = make(seed=index)
        return sample["image"], sample["mask"]


def invert(sample, rng):
    return {**sample, "image": 255 - sample["image"]}


def test_a_function_of_ones_own_finds_what_stands_before_it_done():
    transforms = [JITTER, SegRescale(0.5), invert, SegRandomFlip(1.0)]
    sample, rng = make(), np.random.default_rng(5)
    for transform in transforms:
        sample = transform(sample, rng)
    found = apply_transforms(transforms, make(), np.random.default_rng(5))
    assert "finish" not in found  # the jitter stands before the function, so it was done on the spot
    np.testing.assert_array_equal(found["inputs"].permute(1, 2, 0).numpy(), sample["image"])
    np.testing.assert_array_equal(found["targets"].numpy(), sample["mask"])


def test_the_last_of_two_jitters_is_left_to_the_device():
    first, rng = Fixed([(0, 0.5)]), np.random.default_rng(0)
    found = apply_transforms([first, JITTER], make(), rng)
    np.testing.assert_array_equal(found["inputs"].permute(1, 2, 0).numpy(), first(make(), None)["image"])
    assert found["finish"].shape == (13,)


def test_colours_depend_on_seed_epoch_and_index_alone_and_are_drawn_in_the_order_of_the_transforms():
    dataset = Noise(RECIPE)
    one, again = dataset[SampleIndex(1, 7, 2)], Noise(RECIPE)[SampleIndex(1, 7, 2)]
    assert all(torch.equal(one[key], again[key]) for key in ("inputs", "targets", "finish"))
    others = [dataset[SampleIndex(*other)]["finish"] for other in ((1, 8, 2), (1, 7, 3), (2, 7, 2))]
    assert not any(torch.equal(one["finish"], other) for other in others)
    rng = np.random.default_rng((7, 2, 1))
    rng.permutation(3)
    factors = [rng.uniform(0.5, 1.5) for _ in range(3)]
    np.testing.assert_allclose(one["finish"][4:13:3].numpy(), factors, rtol=1e-6)
    rest = apply_transforms(RECIPE[1:5], make(seed=1), rng)
    assert all(torch.equal(one[key], rest[key]) for key in ("inputs", "targets"))


@pytest.mark.parametrize(
    ("transforms", "place", "message"),
    [
        ([SegNormalize(MEAN, STD), SegRandomFlip()], 0, "SegNormalize stands before SegRandomFlip"),
        ([SegRandomFlip(), SegStandardize(), JITTER], 1, "SegStandardize stands before SegColorJitter"),
        ([SegStandardize(), invert, SegNormalize(MEAN, STD)], 0, "SegStandardize stands before invert"),
        ([SegConvertToTensor(), SegNormalize(MEAN, STD)], 0, "SegConvertToTensor stands before SegNormalize"),
    ],
)
def test_what_cannot_follow_normalisation_is_refused_with_its_place(transforms, place, message):
    with pytest.raises(ConfigError, match=rf"^transforms\[{place}\]: {message}.* may end the list"):
        Noise(transforms)


@pytest.mark.parametrize("dtype", [None, "long", "int64", "torch.int64", torch.int64])
def test_masks_as_the_loss_gets_them_may_be_asked_for(dtype):
    assert SegConvertToTensor(mask_output_dtype=dtype)(make(), None)["mask"].dtype == np.uint8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"type": "SegConvertToTensor", "mask_output_dtype": "float32"},
            "mask_output_dtype: masks travel as uint8",
        ),
        (
            {"type": "SegConvertToTensor", "add_mask_dummy_dim": True},
            r"add_mask_dummy_dim: .* masks \(H, W\)",
        ),
        ({"type": "SegStandardize", "max_value": 0}, "max_value: must be greater than 0"),
        ({"type": "SegNormalize", "mean": [0.5], "std": [0.5]}, "three numbers each"),
        ({"type": "SegNormalize", "mean": MEAN, "std": (1, 0, 1)}, "greater than 0"),
    ],
)
def test_arguments_without_a_meaning_here_are_refused(arguments, message):
    with pytest.raises((ConfigError, BuildError), match=message):
        TRANSFORMS.build(arguments)
