"""Test that the wheel and the sdist are complete, and that the installed commands run in an empty folder."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SMALL = [
    "train_dataloader.dataset.size=[64,128]",
    "train_dataloader.dataset.length=8",
    "val_dataloader.dataset.size=[64,128]",
    "val_dataloader.dataset.length=4",
    "train_cfg.max_epochs=1",
    "train_cfg.val_interval=1",
    "param_scheduler.0.end=1",
    "param_scheduler.1.begin=1",
]

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """Return the environment variables without those that would make Python import this source tree."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def checked(*command: str | Path, cwd: Path) -> str:
    """Run a command in `cwd`, check that it succeeds, and return its output."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build the sdist, and the wheel from the sdist, with the installed build backend."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    checked(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Install the wheel in a new virtual environment and return the folder of its commands.

    The environment imports the dependencies from the site-packages folders of this interpreter. The `.pth` files in
    these folders are not read, so an editable installation of this source tree is not visible.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    checked(sys.executable, "-m", "pip", "--python", str(python), *install, str(wheel), cwd=folder)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(own, "dependencies.pth").write_text("".join(f"{path}\n" for path in shared))
    return folder / "bin"


def tracked(under: str = "") -> set[str]:
    """Return the files of this repository that git tracks below a folder."""
    done = subprocess.run(["git", "ls-files", "-z", f"./{under}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the source tree is not a git repository")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_wheel_contains_every_file_of_the_package(wheel):
    names = {f"src/{name}" for name in zipfile.ZipFile(wheel).namelist()}
    expected = tracked("src/slipstream")
    assert {"src/slipstream/py.typed", "src/slipstream/recipes/street_scenes_pp_lite_t.yaml"} <= expected
    assert expected - names == set()


def test_sdist_contains_every_tracked_file_so_its_tests_can_run(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "constraints.txt", "docs/README.md", "LICENSE"} <= names
    assert tracked() - names == set()


def test_commands_run_from_the_installed_wheel(installed, tmp_path):
    where = "import slipstream; print(slipstream.__file__)"
    package = Path(checked(installed / "python", "-c", where, cwd=tmp_path).strip()).parent
    assert package.is_relative_to(installed.parent)

    assert checked(installed / "slipstream", "--version", cwd=tmp_path).split()[1] == VERSION
    recipes = json.loads(checked(installed / "slipstream", "recipes", "--json", cwd=tmp_path))
    assert "street_scenes_pp_lite_t" in json.dumps(recipes)
    assert list(tmp_path.iterdir()) == []


def test_recipe_trains_from_the_installed_wheel(installed, tmp_path):
    command = (installed / "slipstream", "train", "street_scenes_pp_lite_t", *SMALL)
    last = checked(*command, cwd=tmp_path).strip().splitlines()[-1]
    assert last.startswith("Done: ")
    assert "mIoU" in last
    run = tmp_path / "work_dirs/street_scenes_pp_lite_t"
    assert (run / "predictions.png").stat().st_size > 0
    assert (run / "epoch_1.pth").stat().st_size > 0
    (page,) = run.glob("*/report.html")
    text = page.read_text(encoding="utf-8")
    assert all(part in text for part in ("<style", "<svg", "mIoU"))


def test_starter_project_is_written_by_the_installed_wheel(installed, tmp_path):
    checked(installed / "slipstream", "new", "project", cwd=tmp_path)
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "project").iterdir()}
    templates = list((ROOT / "src/slipstream/cli/starter").glob("*.*"))
    assert {path.name for path in templates} <= written.keys()
    assert all(written.values())
