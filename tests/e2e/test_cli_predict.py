"""Tests of `slipstream predict` with a network that predicts class 0 for dark pixels and class 1 for bright pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from slipstream.cli.main import main
from slipstream.dataset.sources.decode import read_mask
from slipstream.registry import MODELS

PALETTE = [[10, 20, 30], [200, 100, 50]]
RUN = "work_dirs/run"


class BrightOrDark(torch.nn.Module):
    error = None
    """Error to raise for images with a height of 8 pixels."""

    def forward(self, images):
        if self.error is not None and images.shape[-2] == 8:
            raise self.error
        bright = images.mean(1, keepdim=True)
        return torch.cat([127.5 - bright, bright - 127.5], 1)


class ClassOfImage(torch.nn.Module):
    task = "classification"

    def forward(self, images):
        return images.mean((2, 3))[:, :2]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    classes = (BrightOrDark, ClassOfImage)
    for cls in classes:
        MODELS.register_module(module=cls)
    yield
    for cls in classes:
        MODELS.module_dict.pop(cls.__name__)


@pytest.fixture(autouse=True)
def _run_folder(tmp_path, monkeypatch):
    """Change to an empty folder, and write a run with a last and a best checkpoint to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / RUN).mkdir(parents=True)
    cfg = dict(
        model=dict(
            type="Segmentor",
            network=dict(type="BrightOrDark"),
            data_preprocessor=dict(type="ImgDataPreprocessor"),
        )
    )
    meta = dict(
        cfg=yaml.safe_dump(cfg), epoch=2, dataset_meta=dict(classes=["dark", "bright"], palette=PALETTE)
    )
    hub = dict(runtime_info={"best_score/mIoU": 61.25, "best_ckpt/mIoU": "best_mIoU_epoch_2.pth"})
    for name in ("epoch_3.pth", "best_mIoU_epoch_2.pth"):
        torch.save(dict(meta=meta, state_dict={}, message_hub=hub), f"{RUN}/{name}")
    (tmp_path / RUN / "last_checkpoint").write_text(f"{RUN}/epoch_3.pth")


def half_bright():
    """Return an image of shape (40, 60, 3) whose left half is bright."""
    image = np.full((40, 60, 3), 20, np.uint8)
    image[:, :30] = 240
    return image


def test_the_best_checkpoint_of_the_newest_run_is_used_and_printed(capsys):
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"Checkpoint: {RUN}/best_mIoU_epoch_2.pth (epoch 2)"


def test_a_run_without_a_best_checkpoint_uses_the_last_one(tmp_path, capsys):
    Path(f"{RUN}/best_mIoU_epoch_2.pth").unlink()
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png", "--checkpoint", RUN]) == 0
    assert f"Checkpoint: {RUN}/epoch_3.pth (epoch 2)" in capsys.readouterr().out


def test_a_photo_is_segmented_in_its_display_orientation():
    exif = Image.Exif()
    exif[0x0112] = 6  # viewers rotate the image by 90 degrees clockwise: its left half is at the top
    Image.fromarray(half_bright()).save("photo.jpg", exif=exif, quality=100)
    assert main(["predict", "photo.jpg"]) == 0
    mask = read_mask_of("photo")
    assert mask.shape == (60, 40)
    np.testing.assert_array_equal(mask[:28], 1)
    np.testing.assert_array_equal(mask[32:], 0)
    with Image.open("predictions/photo_overlay.png") as overlay:
        assert overlay.size == (40, 60)


def test_mask_files_contain_class_ids_and_colors():
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 0
    np.testing.assert_array_equal(read_mask_of("a"), half_bright()[..., 0] // 240)
    with Image.open("predictions/a_mask.png") as mask:
        colors = np.asarray(mask.convert("RGB"))
    assert colors[0, 0].tolist() == PALETTE[1]
    assert colors[0, -1].tolist() == PALETTE[0]


def test_folders_and_patterns_are_searched_and_the_output_folder_is_skipped(tmp_path, capsys):
    (tmp_path / "photos/inner").mkdir(parents=True)
    (tmp_path / "photos/notes.txt").write_text("no picture")
    for name in ("photos/a.png", "photos/inner/a.png", "more_1.png", "more_2.png", "other.png"):
        Image.fromarray(half_bright()).save(name)
    for _ in range(2):  # in the second run, the folder contains the results of the first one
        assert main(["predict", "photos", "more_*.png", "--out", "photos/out"]) == 0
    written = {
        str(path.relative_to(tmp_path / "photos/out"))
        for path in (tmp_path / "photos/out").rglob("*_mask.png")
    }
    assert written == {"a_mask.png", "inner/a_mask.png", "more_1_mask.png", "more_2_mask.png"}
    assert main(["predict", "photos/**/a.png", "--out", "other_out"]) == 0
    assert (tmp_path / "other_out/a_mask.png").is_file()
    assert (tmp_path / "other_out/inner/a_mask.png").is_file()
    assert main(["predict", "nothing_*.png"]) == 1
    assert "nothing_*.png matches no image or video" in capsys.readouterr().err


def test_unreadable_files_are_listed_and_the_others_are_processed(tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.fromarray(half_bright()[..., 0].astype(np.uint16) * 257).save("deep.png")
    Image.fromarray(half_bright()).save("good.png")
    assert main(["predict", "broken.png", "missing.png", "deep.png", "good.png"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [name in line for name, line in zip(("broken", "missing", "deep"), lines, strict=True)] == [
        True
    ] * 3
    assert read_mask_of("good").max() == 1
    assert not (tmp_path / "predictions/deep_mask.png").exists()


def test_class_statistics_are_fractions_of_pixels(tmp_path, capsys):
    Image.fromarray(half_bright()).save("half.png")
    Image.fromarray(np.full((10, 60, 3), 20, np.uint8)).save("dark.png")
    assert main(["predict", "half.png", "dark.png"]) == 0
    table = (tmp_path / "predictions/classes.csv").read_text().splitlines()
    assert table == ["file,dark,bright", "half.png,0.500000,0.500000", "dark.png,1.000000,0.000000"]
    # The two images have 3000 pixels in total, of which 1800 are dark.
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dark", "60.00%", "2", "of", "2"] in rows
    assert ["bright", "40.00%", "1", "of", "2"] in rows


def write_best(network, palette=PALETTE, model="Segmentor"):
    cfg = dict(model=dict(type=model, network=dict(type=network)))
    meta = dict(cfg=yaml.safe_dump(cfg), dataset_meta=dict(classes=["dark", "bright"], palette=palette))
    torch.save(dict(meta=meta, state_dict={}), f"{RUN}/best_mIoU_epoch_2.pth")


@pytest.mark.parametrize(
    ("network", "model"), [("BrightOrDark", "Classifier"), ("ClassOfImage", "SupervisedModel")]
)
def test_a_classification_checkpoint_with_a_palette_raises_an_error(network, model, capsys):
    write_best(network, model=model)
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 1
    assert "requires segmentation" in capsys.readouterr().err


def test_a_segmentation_checkpoint_without_a_palette_is_not_called_a_classifier(capsys):
    write_best("BrightOrDark", palette=None)
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 1
    printed = capsys.readouterr().err
    assert "must contain a palette" in printed
    assert "segmentation checkpoint" not in printed


def read_mask_of(stem):
    return read_mask(Path(f"predictions/{stem}_mask.png"))


# ---- videos ----------------------------------------------------------------------------------------------


def write_video(path, images, clockwise=False):
    """Write a video. With `clockwise`, its header tells players to rotate it by 90 degrees clockwise."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    if clockwise:
        one, minus = (value.to_bytes(4, "big", signed=True) for value in (0x10000, -0x10000))
        none, last = bytes(4), (0x40000000).to_bytes(4, "big")
        identity = one + none * 3 + one + none * 3 + last
        data = path.read_bytes()
        at = data.index(identity, data.index(b"tkhd"))
        path.write_bytes(data[:at] + none + one + none + minus + none * 4 + last + data[at + len(identity) :])


@pytest.mark.parametrize("clockwise", [False, True])
def test_each_video_frame_is_segmented_in_its_display_orientation(tmp_path, clockwise):
    moving = [np.full((48, 64, 3), 20, np.uint8) for _ in range(6)]
    for number, image in enumerate(moving):
        image[:, : 8 * (number + 1)] = 240
    write_video(tmp_path / "clip.mp4", moving, clockwise)
    assert main(["predict", "clip.mp4", "--every", "2"]) == 0
    masks = sorted((tmp_path / "predictions/clip_mask").iterdir())
    assert [path.name for path in masks] == ["000000.png", "000002.png", "000004.png"]
    for path in masks:
        expected = moving[int(path.stem)][..., 0] // 240
        expected = np.rot90(expected, -1) if clockwise else expected
        found = read_mask(path)
        assert found.shape == expected.shape
        assert (found == expected).mean() > 0.95, (
            "at least 5% of the pixels differ; the codec only changes pixels near edges"
        )
    import av

    with av.open("predictions/clip_overlay.mp4") as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == 2.5
    assert [frame.shape for frame in decoded] == [(*expected.shape, 3)] * 3


def test_a_damaged_video_is_listed(tmp_path, capsys):
    pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    assert main(["predict", "clip.mp4"]) == 1
    assert "cannot read 'clip.mp4'" in capsys.readouterr().err
    assert not (tmp_path / "predictions/clip_overlay.mp4").exists()


# ---- the configuration in the checkpoint ----------------------------------------------------------------


def write_checkpoint(cfg, weights=None):
    meta = dict(cfg=yaml.safe_dump(cfg), dataset_meta=dict(classes=["dark", "bright"], palette=PALETTE))
    torch.save(dict(meta=meta, state_dict=weights or {}), f"{RUN}/best_mIoU_epoch_2.pth")


def test_the_runners_data_preprocessor_normalizes_the_images():
    preprocessor = dict(type="ImgDataPreprocessor", mean=[-200.0] * 3, std=[1.0] * 3)  # all pixels are bright
    model = dict(type="Segmentor", network=dict(type="BrightOrDark"))
    write_checkpoint(dict(model=model, data_preprocessor=preprocessor))
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 0
    np.testing.assert_array_equal(read_mask_of("a"), 1)


def test_a_model_trained_with_the_runners_loss_fn_raises_an_error(capsys):
    write_checkpoint(dict(model=dict(type="BrightOrDark"), loss_fn=dict(type="CrossEntropyLoss")))
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 1
    assert "the configuration sets loss_fn" in capsys.readouterr().err


@pytest.mark.parametrize("weights", [{}, {"loss.scale": torch.ones(3)}])
def test_the_loss_is_neither_built_nor_loaded(weights):
    model = dict(type="Segmentor", network=dict(type="BrightOrDark"), loss=dict(type="MyFocal", gamma=2.0))
    write_checkpoint(dict(model=model, data_preprocessor=dict(type="ImgDataPreprocessor")), weights)
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 0
    np.testing.assert_array_equal(read_mask_of("a")[:, :30], 1)


def test_error_for_an_unknown_class_names_its_key_and_the_config_option(capsys):
    write_checkpoint(dict(model=dict(type="Segmentor", network=dict(type="MyNetwork"))))
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 1
    error = capsys.readouterr().err
    assert "best_mIoU_epoch_2.pth: model.network: 'MyNetwork' is not a registered" in error
    assert "set `--config`" in error


def test_environment_variables_are_not_read_for_a_checkpoint(monkeypatch, capsys):
    monkeypatch.setenv("NETWORK", "BrightOrDark")
    write_checkpoint(dict(model=dict(type="Segmentor", network=dict(type="{{ $NETWORK }}"))))
    Image.fromarray(half_bright()).save("a.png")
    assert main(["predict", "a.png"]) == 1
    error = capsys.readouterr().err
    assert "no environment variables are read" in error
    assert "set `--config`" in error
