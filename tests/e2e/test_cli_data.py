"""Tests of the commands `slipstream data stats|cache|show`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from slipstream.cli.main import main
from slipstream.config import Config
from slipstream.model import BaseModel
from slipstream.registry import DATASETS
from slipstream.runner import Runner

RECIPE = """
model: {type: Segmentor}
train_dataloader:
  batch_size: 3
  drop_last: true
  num_workers: 2
  persistent_workers: true
  sampler: {type: DefaultSampler, shuffle: true}
  dataset: &train
    type: ImageMaskFolder
    data_root: data
    images: img
    masks: ann
    classes: [road, tree, car, ghost]
    transforms:
      - {type: SegRandomFlip, prob: 0.5}
      - {type: SegColorJitter, brightness: 0.4}
      - {type: SegStandardize}
      - {type: SegNormalize, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
val_dataloader:
  dataset: {<<: *train, images: val, masks: valann, transforms: []}
randomness: {seed: 4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for images, masks, count, size in (("img", "ann", 7, (12, 20)), ("val", "valann", 2, (10, 10))):
        for i in range(count):
            rng = np.random.default_rng(i)
            write(tmp_path / f"data/{images}/{i}.png", rng.integers(0, 256, (*size, 3)))
            write(tmp_path / f"data/{masks}/{i}.png", rng.choice([0, 1, 2, 255], size))
    return tmp_path


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.astype(np.uint8)).save(path)


def ran(capsys, *arguments, status=0):
    assert main(["data", *arguments]) == status
    printed = capsys.readouterr()
    return printed.out if status != 2 else printed.err


def pixels(folder, kind, count=7):
    return np.stack([np.asarray(Image.open(folder / f"data/{kind}/{i}.png")) for i in range(count)])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_stats_match_numpy_counts(folder, capsys, workers):
    found = json.loads(ran(capsys, "stats", "recipe.yaml", "--json", "--workers", workers))
    assert found["faults"] == []
    train, val = found["data"]
    images, masks = pixels(folder, "img"), pixels(folder, "ann")
    assert (train["samples"], train["readable"], val["samples"]) == (7, 7, 2)
    assert train["sizes"] == [{"height": 12, "width": 20, "samples": 7}]
    assert train["mean"] == pytest.approx(images.mean((0, 1, 2)))
    assert train["std"] == pytest.approx(images.std((0, 1, 2)))
    for i, entry in enumerate(train["classes"]):
        assert entry["share"] == pytest.approx((masks == i).mean())
        assert entry["samples"] == (masks == i).any((1, 2)).sum()
    assert train["ignored"] == pytest.approx((masks == 255).mean())


def test_table_lists_sizes_and_warns_about_classes_without_pixels(folder, capsys):
    write(folder / "data/img/0.png", np.zeros((8, 9, 3)))
    write(folder / "data/ann/0.png", np.zeros((8, 9)))
    printed = ran(capsys, "stats", "recipe.yaml", "--split", "train", "--workers", "1")
    assert (
        "7 samples of ImageMaskFolder (7 readable), pixels (width x height): 20 x 12 (6), 9 x 8 (1)"
        in printed
    )
    assert "Warning: classes without pixels: ghost" in printed
    assert "val_dataloader" not in printed


def test_broken_files_are_listed_and_other_files_are_counted(folder, capsys):
    (folder / "data/img/1.png").write_bytes(b"no picture")
    (folder / "data/ann/1.png").write_bytes(b"")
    write(folder / "data/ann/3.png", np.zeros((5, 5)))
    write(folder / "data/ann/5.png", np.full((12, 20), 77))
    (folder / "data/valann/1.png").unlink()
    printed = ran(capsys, "stats", "recipe.yaml", status=1)
    for named in (
        "img/1.png'",
        "is 5 x 5",
        "77",
        "without a mask: 'data/val/1.png'",
    ):
        assert named in printed
    assert "Broken data (4)" in printed
    found = json.loads(ran(capsys, "stats", "recipe.yaml", "--json", status=1))
    assert len(found["faults"]) == 4
    (train,) = found["data"]
    assert train["readable"] == 4


def test_classification_dataset_has_statistics(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labeled_data.py").write_text(
        "import torch\n"
        "class Labeled(torch.utils.data.Dataset):\n"
        "    metainfo = {'classes': ('a', 'b')}\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.full((1, 3, 5), 10 * i, dtype=torch.uint8), i % 2\n"
    )
    (tmp_path / "run.py").write_text(
        "from labeled_data import Labeled\nmodel = {}\ntrain_dataloader = dict(dataset=dict(type=Labeled))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = json.loads(ran(capsys, "stats", "run.py", "--json"))["data"]
    assert [(c["name"], c["samples"], c["share"]) for c in found["classes"]] == [("a", 2, 0.5), ("b", 2, 0.5)]
    assert found["mean"] == [15.0]
    assert "there is nothing to cache" in ran(capsys, "cache", "run.py")
    ran(capsys, "show", "run.py", "--count", "2", "--out", "s.png")
    assert Image.open("s.png").width > 100


def test_cache_is_filled_next_to_the_data_and_verified(folder, capsys):
    printed = ran(capsys, "cache", "recipe.yaml", "--workers", "2")
    cache = folder / "data.cache"
    assert "train_dataloader.dataset: 7 samples" in printed
    assert "7 decoded now, 0 already cached" in printed
    assert f"train_dataloader.dataset.cache={cache}" in printed
    assert len(list(cache.glob("*/*.decoded"))) == 9
    again = ran(capsys, "cache", "recipe.yaml", f"train_dataloader.dataset.cache={cache}", "--workers", "1")
    assert "0 decoded now, 7 already cached" in again
    assert "train_dataloader.dataset.cache=" not in again
    assert f"val_dataloader.dataset.cache={cache}" in again


def test_damaged_cache_file_is_rewritten(folder, capsys):
    ran(capsys, "cache", "recipe.yaml", "--folder", "c", "--workers", "1")
    path = next((folder / "c").glob("*/*.decoded"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.warns(UserWarning, match=path.name):
        printed = ran(capsys, "cache", "recipe.yaml", "--folder", "c", "--workers", "1")
    assert "1 decoded now" in printed
    assert path.read_bytes() == whole


def test_broken_links_are_listed_and_other_samples_are_cached(folder, capsys):
    for i in (1, 4):
        (folder / f"data/img/{i}.png").unlink()
        (folder / f"data/img/{i}.png").symlink_to("nowhere.png")
    printed = ran(capsys, "cache", "recipe.yaml", status=1)
    assert "train_dataloader.dataset: 5 samples" in printed
    assert "Not cached (2)" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cache", "street_scenes_pp_lite_t"], "set `--folder`"),
        (["stats", "recipe.yaml", "--split", "test"], "no test_dataloader (available splits: train, val)"),
        (["stats", "recipe.yaml", "train_dataloader.dataset.imags=x"], "did you mean 'images'"),
        (["show", "recipe.yaml", "--epoch", "-1"], "--epoch: must be at least 0"),
        (
            ["show", "recipe.yaml", "--out", "sheet.pgn"],
            "--out: cannot write 'sheet.pgn': unknown file extension",
        ),
        (["show", "recipe.yaml", "--out", "recipe.yaml/sheet.png"], "--out: cannot write 'recipe.yaml/sheet"),
    ],
)
def test_invalid_arguments_raise_one_line_errors(folder, capsys, arguments, expected):
    error = ran(capsys, *arguments, status=2)
    assert expected in error
    assert error.count("\n") == 1


def test_sheet_shows_the_samples_of_the_training_epoch(folder, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "slipstream.cli.data.contact_sheet", lambda *a: shown.append(a) or Image.new("L", (1, 1))
    )
    printed = ran(capsys, "show", "recipe.yaml", "--count", "6", "--epoch", "2", "--out", "new/sheet.png")
    assert "new/sheet.png: 6 samples of the train split" in printed
    assert (folder / "new/sheet.png").is_file()
    ((rows, titles, captions, legend),) = shown
    assert titles == ("image", "mask", "overlay")
    assert [name for name, _ in legend] == ["road", "tree", "car", "ghost"]
    inputs, targets = network_inputs(epoch=2)
    for (image, mask, _), caption, seen, target in zip(rows, captions, inputs, targets, strict=True):
        assert caption.endswith(", epoch 2, seed 4")
        assert np.abs(image - (127.5 * seen + 127.5)).max() < 0.51
        ignored = target == 255
        assert (mask[ignored] == mask[ignored][0]).all()
        assert not (mask[~ignored] == mask[ignored][0]).all(-1).any()


class Recorder(BaseModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, inputs, targets, mode):
        self.seen.append((inputs.permute(0, 2, 3, 1).numpy(), targets.numpy()))
        return {"loss": self.weight.sum()}


def network_inputs(epoch):
    """Return the inputs (N, H, W, C) and targets (N, H, W) of one training epoch."""
    model = Recorder()
    cfg = Config.fromfile("recipe.yaml")
    Runner(
        model,
        work_dir="run",
        train_dataloader={**cfg.train_dataloader, "num_workers": 0},
        train_cfg=dict(by_epoch=True, max_epochs=epoch + 1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        randomness=cfg.randomness,
        visualizer=dict(type="Visualizer", vis_backends=[]),
    ).train()
    batches = model.seen[-2:]  # two batches of three from seven samples
    return [np.concatenate(part) for part in zip(*batches, strict=True)]


def test_printed_overrides_are_valid_for_a_composed_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed = Path(__file__).resolve().parents[1] / "recipes/composed"
    short = [f"dataset_params.{split}_dataset_params.length=2" for split in ("train", "val")]
    short.append(f"--config-dir={composed}")
    printed = ran(capsys, "cache", "composed_regseg48", *short, "--folder", "c")
    arguments = [line.strip() for line in printed.splitlines() if line.startswith("  +")]
    assert len(arguments) == 2
    again = ran(capsys, "cache", "composed_regseg48", *short, *arguments)
    assert again.count("0 decoded now, 2 already cached") == 2
    assert "To train with the cache" not in again


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("action", ["stats", "cache", "show"])
def test_iterable_dataset_raises_a_one_line_error(folder, capsys, monkeypatch, action):
    DATASETS.get("ConcatDataset")
    monkeypatch.setitem(DATASETS.module_dict, "Stream", Stream)
    (folder / "stream.yaml").write_text(
        "{model: {type: Segmentor}, train_dataloader: {dataset: {type: Stream}}}"
    )
    said = ran(capsys, action, "stream.yaml", status=2).strip()
    assert "\n" not in said
    assert "train_dataloader.dataset: must be a map-style dataset, not Stream" in said
