"""Generate docs/mmengine_api.md: `python tests/openmmlab/mmengine_page.py`.

The script compares the public names of the installed MMEngine with those that `slipstream.openmmlab` provides.
"""

import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/mmengine_api.md"
PACKAGES = (
    "dist",
    "evaluator",
    "hooks",
    "infer",
    "logging",
    "model",
    "optim",
    "registry",
    "runner",
    "visualization",
)

HEAD = """# MMEngine's public API

`slipstream.openmmlab` makes `import mmengine` import Slipstream's modules where there are any
([OpenMMLab's libraries](from_mmengine.md#openmmlabs-libraries)). `mmengine.analysis`, `config`, `dataset` (except the
samplers), `device`, `fileio`, `hub`, `structures`, `testing` and `utils` are MMEngine's own. This page compares the
public names of the other packages with those of MMEngine {version}. `python tests/openmmlab/mmengine_page.py` generates
this page.

Parameters and methods that exist only in Slipstream, and the behavior of functions, are not compared;
[from_mmengine.md](from_mmengine.md#openmmlabs-libraries) lists the differences in behavior.
"""


def parameters(obj):
    """Return the names of the parameters of a function or a constructor."""
    try:
        return [p.name for p in inspect.signature(obj).parameters.values() if p.kind not in (2, 4)]
    except (TypeError, ValueError):
        return []


def takes_any(obj):
    try:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(obj).parameters.values())
    except (TypeError, ValueError):
        return True


def members(cls):
    """Return the public methods and properties that MMEngine defines in a class."""
    kinds = [kind for kind in cls.__mro__ if kind.__module__.startswith("mmengine.")]
    found = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("_")}
    return sorted(
        n for n, v in found.items() if callable(v) or isinstance(v, property | classmethod | staticmethod)
    )


def record():
    """Return the version and the public names of the installed MMEngine, with their parameters and members."""
    import mmengine

    names = {}
    for package in PACKAGES:
        module = importlib.import_module(f"mmengine.{package}")
        for name in sorted(module.__all__):
            obj = getattr(module, name)
            entry = {"parameters": parameters(obj) if callable(obj) else []}
            names[f"{package}.{name}"] = entry | {"members": members(obj) if inspect.isclass(obj) else []}
    return {"version": mmengine.__version__, "names": names}


def is_set(cls, name):
    """Return whether a class has an attribute, or one of its methods sets it on `self`."""
    own = [kind for kind in cls.__mro__ if kind.__module__.startswith(("slipstream.", "mmengine."))]
    return hasattr(cls, name) or any(
        re.search(rf"self\.{name}\b[^=\n]*=[^=]", inspect.getsource(kind))
        for kind in own
        if kind.__module__ != "slipstream.openmmlab.schedulers"
    )


def differences(path, entry):
    """Return what Slipstream's object lacks."""
    package, name = path.split(".")
    obj = getattr(importlib.import_module(f"mmengine.{package}"), name, None)
    if obj is None:
        return "missing"
    lost = [] if takes_any(obj) else [n for n in entry["parameters"] if n not in parameters(obj)]
    notes = [f"no parameter {', '.join(f'`{n}`' for n in lost)}"] if lost else []
    absent = [name for name in entry["members"] if not is_set(obj, name)]
    return "; ".join(notes + ([f"no attribute {', '.join(f'`{n}`' for n in absent)}"] if absent else []))


def page():
    """Return the text of the page."""
    done = subprocess.run([sys.executable, __file__, "--record"], capture_output=True, text=True, check=True)
    installed = json.loads(done.stdout.splitlines()[-1])
    importlib.import_module("slipstream.openmmlab")
    lines = [HEAD.format(version=installed["version"])]
    for package in PACKAGES:
        names = {k.split(".")[1]: e for k, e in installed["names"].items() if k.startswith(f"{package}.")}
        notes = {name: differences(f"{package}.{name}", entry) for name, entry in names.items()}
        equal = ", ".join(f"`{name}`" for name in names if not notes[name])
        same = f"Same parameters and attributes: {equal}.\n" if equal else ""
        lines.append(f"\n## mmengine.{package}\n\n{same}")
        grouped = {}
        for name in names:
            grouped.setdefault(notes[name], []).append(f"`{name}`")
        grouped.pop("", None)
        if grouped:
            lines.append("\n| names | difference |\n|---|---|\n")
            lines += [f"| {', '.join(group)} | {note} |\n" for note, group in grouped.items()]
    return "".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--record" in sys.argv:
        print(json.dumps(record()))
    else:
        PAGE.write_text(page())
