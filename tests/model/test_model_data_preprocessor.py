import numpy as np
import pytest
import torch

from slipstream.model import BaseDataPreprocessor, ImgDataPreprocessor

MEAN, STD = [120.0, 110.0, 100.0], [60.0, 55.0, 50.0]
RNG = np.random.default_rng(0)


def normalized(image):
    """Return the normalized image (..., 3, H, W) in float64."""
    mean, std = (np.asarray(v).reshape(3, 1, 1) for v in (MEAN, STD))
    return (np.asarray(image, float) - mean) / std


def image(*shape, dtype=np.uint8):
    return RNG.integers(0, 256, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_images_are_normalized_to_float32(dtype):
    pixels = image(2, 3, 4, 5, dtype=dtype)
    out = ImgDataPreprocessor(MEAN, STD)({"inputs": torch.from_numpy(pixels), "targets": 7})
    assert out["inputs"].dtype == torch.float32
    assert out["targets"] == 7
    np.testing.assert_allclose(out["inputs"].numpy(), normalized(pixels), atol=1e-5)


def test_images_without_mean_and_std_are_only_converted_to_float():
    pixels = image(2, 3, 4, 5)
    out = ImgDataPreprocessor()({"inputs": torch.from_numpy(pixels)})["inputs"]
    np.testing.assert_array_equal(out.numpy(), pixels.astype(np.float32))


@pytest.mark.parametrize("option", ["bgr_to_rgb", "rgb_to_bgr"])
def test_channels_are_flipped_before_normalization(option):
    pixels = image(2, 3, 4, 5)
    out = ImgDataPreprocessor(MEAN, STD, **{option: True})({"inputs": torch.from_numpy(pixels)})["inputs"]
    np.testing.assert_allclose(out.numpy(), normalized(pixels[:, ::-1]), atol=1e-5)


def test_images_are_padded_at_the_right_and_bottom_after_normalization():
    pixels = image(2, 3, 5, 8)
    preprocess = ImgDataPreprocessor(MEAN, STD, pad_size_divisor=4, pad_value=-9)
    out = preprocess({"inputs": torch.from_numpy(pixels)})["inputs"].numpy()
    wanted = np.pad(normalized(pixels), ((0, 0), (0, 0), (0, 3), (0, 0)), constant_values=-9)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_images_of_different_sizes_are_padded_to_the_largest_size():
    pixels = [image(3, 5, 2), image(3, 3, 6)]
    preprocess = ImgDataPreprocessor(MEAN, STD, pad_size_divisor=4)
    out = preprocess({"inputs": [torch.from_numpy(p) for p in pixels]})["inputs"].numpy()
    assert out.shape == (2, 3, 8, 8)
    for got, source in zip(out, pixels, strict=True):
        wanted = np.zeros((3, 8, 8))
        wanted[:, : source.shape[1], : source.shape[2]] = normalized(source)
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [list, tuple])
def test_first_element_of_a_tuple_contains_the_images(kind):
    pixels, labels = image(2, 3, 4, 4), torch.tensor([1, 2])
    out = ImgDataPreprocessor(MEAN, STD)(kind((torch.from_numpy(pixels), labels)))
    np.testing.assert_allclose(out[0].numpy(), normalized(pixels), atol=1e-5)
    assert torch.equal(out[1], labels)


def with_transforms(affine=True):
    """Return two images and a batch whose transforms halve the brightness and, if `affine`, compute (x - 10) / 20."""
    colors = [0, 0, 5, 4, 0.5, 0, 0, 1, 0, 0, 1, 0, 0]
    parameters = torch.tensor([colors + [1 / 20] * 3 + [-10 / 20] * 3] * 2)
    pixels = image(2, 3, 4, 5)
    return pixels, {
        "inputs": torch.from_numpy(pixels),
        "device_params": parameters if affine else parameters[:, :13],
    }


def test_preprocessors_apply_the_device_transforms_of_a_batch():
    for preprocess in (BaseDataPreprocessor(), ImgDataPreprocessor()):
        pixels, batch = with_transforms()
        out = preprocess(batch)
        assert list(out) == ["inputs"]
        np.testing.assert_allclose(out["inputs"].numpy(), (pixels / 2 - 10) / 20, atol=1e-5)


def test_images_are_padded_after_device_transforms():
    pixels, batch = with_transforms()
    out = ImgDataPreprocessor(pad_size_divisor=8, pad_value=7)(batch)["inputs"].numpy()
    np.testing.assert_allclose(out[:, :, :4, :5], (pixels / 2 - 10) / 20, atol=1e-5)
    assert (out[:, :, 4:] == 7).all()
    assert (out[..., 5:] == 7).all()


def test_device_transforms_run_before_normalization_and_channel_flip():
    pixels, batch = with_transforms(affine=False)
    out = ImgDataPreprocessor(MEAN, STD, rgb_to_bgr=True)(batch)["inputs"]
    np.testing.assert_allclose(out.numpy(), normalized(pixels[:, ::-1] / 2), atol=1e-5)
