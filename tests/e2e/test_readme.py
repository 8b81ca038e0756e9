"""All commands and snippets of the README run."""

import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipstream.apps.street_scenes.folder import write_street_folder

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.strip()]
FASHION = Path("/usr/share/datasets/fashion-mnist")

# Overrides that make the README's trainings small enough for a test.
SMALL = [
    "epochs=1",
    "batch_size=2",
    "num_workers=0",
    "training_params.lr_warmup_epochs=0",
    "training_params.average_best_models=False",
    "training_params.max_train_batches=1",
    "training_params.max_valid_batches=1",
]
SMALL_CITYSCAPES = [
    "num_gpus=1",
    "training_params.torch_compile_options.backend=eager",
    "dataset_params.train_dataset_params.transforms.3.SegPadShortToCropSize.crop_size=[64,64]",
    "dataset_params.train_dataset_params.transforms.4.SegCropImageAndMask.crop_size=[64,64]",
]


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder with small data/camvid and data/cityscapes, in which all commands run in order."""
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


def small(arguments: list[str]) -> list[str]:
    """Return the overrides that make this command small enough for a test."""
    if not any(word in arguments for word in ("train", "slipstream.train_from_recipe")):
        return []
    given = {word.partition("=")[0] for word in arguments}
    extra = SMALL + (SMALL_CITYSCAPES if any("cityscapes" in word for word in arguments) else [])
    return [word for word in extra if word.partition("=")[0] not in given - {"batch_size"}]


@pytest.mark.parametrize(
    "diff",
    [
        pytest.param(blocks("diff")[0], id="a Runner"),
        pytest.param(blocks("diff")[1], id="your own loop", marks=pytest.mark.slow),
    ],
)
def test_both_sides_of_the_diff_run(run, diff):
    for own, other in (("-", "+"), ("+", "-")):
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(other)]
        run("-c", "\n".join(lines))
        assert own in diff


def test_custom_loop_changes_in_five_lines():
    _, diff = blocks("diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 5


@pytest.mark.parametrize("snippet", blocks("python"))
def test_python_snippets_run(run, snippet):
    run("-c", snippet)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, photos, run, slipstream):
    arguments = shlex.split(command)
    if arguments[0] == "make":
        planned = subprocess.run(
            ["make", "-n", arguments[1]], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert {"train": "slipstream train street_scenes_pp_lite_t", "test": "-m pytest"}[
            arguments[1]
        ] in planned
    elif arguments[:2] == ["python", "examples/train.py"]:
        if not FASHION.is_dir():
            pytest.skip("needs Debian's dataset-fashion-mnist")
        run(str(ROOT / arguments[1]), "--batches", "2", "--epochs", "1", cwd=photos)
    elif arguments[:2] == ["python", "benchmarks/overhead.py"]:
        run(
            str(ROOT / arguments[1]),
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
    elif arguments[:2] == ["python", "benchmarks/one_graph.py"]:
        short = "--networks MLP --rounds 1 --seconds 0.02 --threads 1 --no-processes --out one_graph.md"
        run(str(ROOT / arguments[1]), *short.split(), cwd=photos)
        assert "Slipstream, one graph" in (photos / "one_graph.md").read_text()
    elif arguments[:2] == ["python", "benchmarks/data.py"]:
        short = "--rounds 1 --images 2 --batches 1 --size 64x128 --out data.md"
        run(str(ROOT / arguments[1]), *short.split(), cwd=photos)
        assert "over PIL" in (photos / "data.md").read_text()
    elif arguments[0] == "python":
        run(*arguments[1:], *small(arguments), cwd=photos)
    else:
        assert arguments[0] == "slipstream"
        images = [str(p.relative_to(photos)) for word in arguments if "*" in word for p in photos.glob(word)]
        arguments = [word for word in arguments[1:] if "*" not in word] + images
        # The exit status of doctor is 1 here because it reports a single thread.
        slipstream(*arguments, *small(arguments), cwd=photos, status=None if arguments == ["doctor"] else 0)


def test_error_in_the_readme_is_current(slipstream):
    (session,) = [text for text in blocks("") if text.startswith("$ slipstream")]
    command, expected = session.splitlines()
    done = slipstream(*shlex.split(command)[2:], status=2)
    assert done.stderr.strip() == expected
