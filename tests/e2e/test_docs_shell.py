"""Tests of the shell commands and diffs on the pages.

All `slipstream` and `train_from_recipe` commands are parsed. On the pages in `RUN`, all commands except pip and make
also run, with shorter training and smaller datasets.
"""

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from doc_pages import ROOT, blocks, commands, text_of
from PIL import Image

from slipstream.cli.configure import load_config
from slipstream.cli.parser import parse
from slipstream.zoo.street_scenes.folder import write_street_folder

RUN = ("README.md", "docs/start.md", "docs/from_supergradients.md", "docs/performance.md")
"""Pages whose commands run here. tests/distributed runs the commands in docs/distributed.md."""
ALL = [(block, line) for block in blocks("bash") if block.runs for line in commands(block)]
COMMANDS = list(dict.fromkeys(line for block, line in ALL if block.page in RUN))
PARSED = list(
    dict.fromkeys(
        line.partition(" > ")[0]
        for _, line in ALL
        if line.startswith(("slipstream ", "python -m slipstream.train_from_recipe "))
    )
)
DIFFS = [block.text for block in blocks("diff", "docs/own_loop.md")]

# Overrides that shorten the training runs of the commands on the pages.
SMALL = ["epochs=1", "batch_size=2", "num_workers=0"]
SMALL_RUNNER = ["limit_train_batches=1", "limit_val_batches=1", "param_scheduler=null"]
SMALL_CITYSCAPES = [
    "num_gpus=1",
    "training_params.lr_warmup_epochs=0",
    "training_params.average_best_models=False",
    "training_params.max_train_batches=1",
    "training_params.max_valid_batches=1",
    "training_params.torch_compile_options.backend=eager",
    "dataset_params.train_dataset_params.transforms.3.SegPadShortToCropSize.crop_size=[64,64]",
    "dataset_params.train_dataset_params.transforms.4.SegCropImageAndMask.crop_size=[64,64]",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder with small datasets in data/camvid and data/cityscapes.

    All commands run in this folder, in order.
    """
    folder = tmp_path_factory.mktemp("readme")
    write_street_folder(folder / "data/cityscapes", train=2, val=1, size=(64, 128))
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        images, masks = folder / f"data/camvid/{split}", folder / f"data/camvid/{split}annot"
        images.mkdir(parents=True)
        masks.mkdir()
        for i in range(8):
            Image.fromarray(rng.integers(0, 255, (90, 120, 3), np.uint8)).save(images / f"{i}.jpg")
            Image.fromarray(rng.integers(0, 12, (90, 120), np.uint8)).save(masks / f"{i}.png")
    return folder


def write_fashion(folder: Path) -> None:
    """Write 128 training images and 50 test images in the format of Fashion-MNIST."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 128), ("t10k", 50)):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        for kind, data in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, data.ndim]) + np.array(data.shape, ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + data.tobytes())


def small(arguments: list[str]) -> list[str]:
    """Return the overrides that shorten the training run of this command, if it trains."""
    if not any(word in arguments for word in ("train", "slipstream.train_from_recipe")):
        return []
    given = {word.partition("=")[0] for word in arguments}
    composed = any("cityscapes" in word for word in arguments)
    extra = SMALL + (SMALL_CITYSCAPES if composed else SMALL_RUNNER)
    return [word for word in extra if word.partition("=")[0] not in given - {"batch_size"}]


@pytest.mark.slow
def test_both_sides_of_the_diff_run(run, monkeypatch):
    # The first block of the README, which also runs, compiles the same network.
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    for other in ("+", "-"):
        run("-c", "\n".join(line[1:] for line in DIFFS[0].splitlines() if not line.startswith(other)))


def test_custom_loop_requires_five_changed_lines():
    assert sum(line.startswith("+") for line in DIFFS[0].splitlines()) == 5


def test_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 120


@pytest.mark.parametrize("command", PARSED)
def test_every_command_is_parsed_and_its_recipe_composed(command):
    words = shlex.split(command)
    if words[0] == "python":
        name, *rest = words[words.index("slipstream.train_from_recipe") + 1 :]
        name = name.removeprefix("--config-name=")
        overrides = [word for word in rest if not word.startswith("--") and "," not in word]
        assert load_config(name, overrides).cfg.model
        return
    args = parse(words[1:])
    config = getattr(args, "config", None)
    if config is not None:
        assert load_config(config, args.overrides).cfg.model


def _mark(command):
    return pytest.mark.exhaustive if command.startswith("python benchmarks/") else pytest.mark.slow


@pytest.mark.parametrize("command", [pytest.param(line, marks=_mark(line)) for line in COMMANDS])
def test_each_command_runs(command, photos, run, slipstream):
    words = shlex.split(command.partition(" > ")[0])
    if words[0] == "pip":
        assert words in (["pip", "install", "-e", "."], ["pip", "install", "-e", ".[all]"])
        assert 'name = "slipstream"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    elif words[0] == "make":
        planned = subprocess.run(
            ["make", "-n", words[1]], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert {"train": "slipstream train street_scenes_pp_lite_t", "test": "-m pytest"}[words[1]] in planned
    elif words[:2] == ["python", "examples/train.py"]:
        write_fashion(photos / "fashion")
        run(str(ROOT / words[1]), "--data", "fashion", "--batches", "2", "--epochs", "1", cwd=photos)
    elif words[:2] == ["python", "benchmarks/overhead.py"]:
        run(
            str(ROOT / words[1]),
            "--steps",
            "60",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--out",
            "overhead.md",
            cwd=photos,
        )
        assert "Slipstream" in (photos / "overhead.md").read_text()
    elif words[:2] == ["python", "benchmarks/one_graph.py"]:
        short = "--networks MLP --rounds 1 --seconds 0.02 --threads 1 --no-processes --out one_graph.md"
        run(str(ROOT / words[1]), *short.split(), cwd=photos)
        assert "Slipstream, one graph" in (photos / "one_graph.md").read_text()
    elif words[:2] == ["python", "benchmarks/data.py"]:
        short = "--rounds 1 --images 2 --batches 1 --size 64x128 --out data.md"
        run(str(ROOT / words[1]), *short.split(), cwd=photos)
        assert "relative to PIL" in (photos / "data.md").read_text()
    elif words[0] == "python":
        run(*words[1:], *small(words), cwd=photos)
    else:
        assert words[0] == "slipstream"
        images = [str(p.relative_to(photos)) for word in words if "*" in word for p in photos.glob(word)]
        words = [word for word in words[1:] if "*" not in word] + images
        # doctor exits with status 1 here because it reports the use of a single thread.
        slipstream(*words, *small(words), cwd=photos, status=None if words == ["doctor"] else 0)


def test_error_on_the_page_is_printed(command):
    (session,) = [
        block.text for block in blocks("", "docs/start.md") if block.text.startswith("$ slipstream")
    ]
    line, expected = session.splitlines()
    assert command(*shlex.split(line)[2:], status=2).err.strip() == expected
