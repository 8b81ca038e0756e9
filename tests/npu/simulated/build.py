"""Build the simulated NPU, and print the folder that must be in PYTHONPATH for torch to load it.

    PYTHONPATH=$(python tests/npu/simulated/build.py) python -c 'import torch; print(torch.ones(2, device="npu"))'

PyTorch loads the package through its entry point in the group `torch.backends`, as it loads Ascend's torch_npu. The
build takes about half a minute. The result is cached in the system's temporary folder, under a key computed from the
versions of Python and torch and from the sources.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "torch_npu"
_ENTRY_POINTS = "[torch.backends]\ntorch_npu = torch_npu:autoload\n"
_METADATA = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 0.0\n"


def folder() -> Path:
    """Return the build folder for this interpreter, this version of torch and the current sources."""
    parts = [sys.version, version("torch"), *(path.read_text() for path in sorted(SOURCES.glob("*.*")))]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"slipstream-npu-{getpass.getuser()}-{digest}"


def build() -> Path:
    """Return the build folder. If it does not exist, build the package first.

    Raises:
        SystemExit: there is no C++ compiler.
        subprocess.CalledProcessError: the compiler fails.
    """
    if shutil.which("g++") is None:
        sys.exit("the simulated NPU requires g++")
    target = folder()
    if target.exists():
        return target
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    package, info = temporary / "torch_npu", temporary / "torch_npu-0.0.dist-info"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("*.cpp", "__pycache__"))
    info.mkdir()
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (info / "METADATA").write_text(_METADATA)
    _compile(package / "_C.so")
    try:
        temporary.rename(target)
    except OSError:  # another process has built it in the meantime
        shutil.rmtree(temporary)
    return target


def _compile(output: Path) -> None:
    spec = importlib.util.find_spec(
        "torch"
    )  # do not import torch here, because that would load an installed torch_npu
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [
        "g++",
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        "-DTORCH_EXTENSION_NAME=_C",
        "-DUSE_C10D_GLOO",
    ]
    command += [f"-I{path}" for path in include]
    command += [
        str(SOURCES / "device.cpp"),
        "-o",
        str(output),
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    command += [f"-l{name}" for name in ("torch", "torch_cpu", "c10", "torch_python")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(build())
