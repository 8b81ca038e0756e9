"""Generate docs/mmengine_api.md: `python tests/openmmlab/mmengine_page.py`.

The script imports the modules of `slipstream.openmmlab.mmengine` and compares their names with `mmengine_names.json`.
"""

import importlib
import importlib.util
import inspect
import json
import re
from collections import Counter
from pathlib import Path

from mmengine_names import DATA, OWN, parameters

PAGE = Path(__file__).parents[2] / "docs/mmengine_api.md"

HEAD = """# MMEngine's public API

`slipstream.openmmlab` makes `import mmengine` import Slipstream
([OpenMMLab's libraries](from_mmengine.md#openmmlabs-libraries)). This page lists the {total} public names of
MMEngine {version} with the parameters of functions and constructors: {same} are identical, {differs} differ, and
{missing} are missing. `python tests/openmmlab/mmengine_page.py` generates this page by comparing a record of MMEngine's
names with Slipstream's modules.

Each name is listed once, under its shortest path in a subpackage. Parameters and methods that exist only in Slipstream,
and the behavior of functions, are not compared here; [from_mmengine.md](from_mmengine.md#openmmlabs-libraries) lists
the differences in behavior.

"""

TRACE = "part of MMEngine's model tracing; Slipstream uses torch's FLOP counter"
TESTING = "helpers for MMEngine's own tests"
BACKENDS = "files are read from local storage or through fsspec"
FORMATS = "`load` and `dump` support JSON, YAML and pickle; other formats cannot be registered"
OPTIMIZERS = "optimizers that a configuration names are looked up in torch and in installed packages"
MODELS = "model names from other projects are not resolved; pass a path or a URL"
ZOO = "Slipstream has no backends for these experiment trackers"
PARSING = "part of MMEngine's configuration parser"
SPEED = "replaced by the `activation_checkpointing` option"
LOGS = "part of MMEngine's logger"
HELPERS = "not used by mmcv, mmpretrain, mmsegmentation or mmdetection"

# The reasons why names are missing, by the start of their paths.
REASONS = (
    (("mmengine.analysis.",), TRACE),
    (("mmengine.testing.", "mmengine.utils.dl_utils.visualize."), TESTING),
    (
        ("mmengine.fileio.handlers.", "mmengine.fileio.BaseFileHandler", "mmengine.fileio.JsonHandler"),
        FORMATS,
    ),
    (("mmengine.fileio.PickleHandler", "mmengine.fileio.YamlHandler"), FORMATS),
    (("mmengine.fileio.register_handler",), FORMATS),
    (("mmengine.fileio.",), BACKENDS),
    (("mmengine.optim.optimizer.builder.", "mmengine.registry.build_functions."), OPTIMIZERS),
    (("mmengine.runner.checkpoint.load_from_", "mmengine.runner.get_"), MODELS),
    (("mmengine.visualization.vis_backend.", "mmengine.visualization.utils."), HELPERS),
    (("mmengine.visualization.",), ZOO),
    (("mmengine.config.",), PARSING),
    (("mmengine.optim.ApexOptimWrapper",), "Apex is replaced by `AmpOptimWrapper`"),
    (("mmengine.optim.BaseOptimWrapper",), "the only base class is `OptimWrapper`"),
    (("mmengine.runner.FlexibleRunner",), "strategies are replaced by `speed=dict(parallel=...)`"),
    (
        ("mmengine.runner.turn_on_activation_checkpointing", "mmengine.runner.activation_checkpointing."),
        SPEED,
    ),
    (("mmengine.model.efficient_conv_bn_eval.",), "`efficient_conv_bn_eval` is not supported"),
    (("mmengine.logging.",), LOGS),
    (("mmengine.",), HELPERS),
)


def load():
    return json.loads(DATA.read_text())


def has_module(name):
    try:
        return importlib.util.find_spec(OWN + name) is not None
    except ModuleNotFoundError:
        return False


def find(path):
    """Return Slipstream's object for a path in MMEngine, or None if there is none."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(OWN + module), name, None) if has_module(module) else None


def names_of(text):
    return [part.rstrip("=") for part in text.split(", ") if part and not part.startswith("*")]


def is_set(cls, name):
    """Return whether a class has an attribute, or one of its methods sets it on `self`."""
    if hasattr(cls, name):
        return True
    own = [kind for kind in cls.__mro__ if kind.__module__.startswith("slipstream.")]
    return any(re.search(rf"self\.{name}\b[^=\n]*=[^=]", inspect.getsource(kind)) for kind in own)


def compare(path, entry):
    """Return `missing`, `same` or `differs`, and the differences."""
    name = path.rpartition(".")[2]
    places = [path, *(f"{module}.{name}" for module in entry["at"])]
    found = {place: obj for place in places if (obj := find(place)) is not None}
    if not found:
        return "missing", []
    obj = next(iter(found.values()))
    notes = []
    if absent := [place.rpartition(".")[0] for place in places if place not in found]:
        notes.append(f"not in {', '.join(f'`{place}`' for place in absent)}")
    if entry["parameters"] is not None:
        notes += compare_parameters(entry["parameters"], parameters(obj))
    if lost := [m for m in entry.get("members", ()) if not is_set(obj, m)]:
        notes.append(no("attribute", lost))
    return "differs" if notes else "same", notes


def no(kind, names):
    """Return a note about missing attributes or parameters."""
    return f"no {kind}{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}"


def compare_parameters(theirs, own):
    """Return a note if parameters are missing or in a different order. Additional parameters are ignored."""
    expected, actual = names_of(theirs), names_of(own)
    if lost := [name for name in expected if name not in actual and "*" not in own]:
        return [no("parameter", lost)]
    shared = [name for name in actual if name in expected]
    if "*" not in theirs and shared != [name for name in expected if name in actual]:
        return [f"the order of the parameters is {', '.join(f'`{name}`' for name in actual)}"]
    return []


def missing_reason(path):
    return next((reason for prefixes, reason in REASONS if path.startswith(prefixes)), None)


def page():
    """Return the text of the page."""
    data = load()
    rows, counts, why = {}, Counter(), {}
    for path, entry in data["names"].items():
        status, notes = compare(path, entry)
        counts[status] += 1
        if status == "missing":
            why.setdefault(missing_reason(path), []).append(path.removeprefix("mmengine."))
        else:
            rows.setdefault(path.split(".")[1], []).append((path, entry, notes))
    absent = [name for name in data["modules"] if not has_module(name)]
    lines = [HEAD.format(version=data["version"], total=len(data["names"]), **counts)]
    lines.append("## Missing names\n\n| names (in `mmengine`) | reason |\n|---|---|\n")
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |\n" for reason, names in why.items()]
    lines.append(f"\nMissing modules: {', '.join(f'`{name}`' for name in absent)}.\n")
    for package, entries in sorted(rows.items()):
        lines.append(f"\n## mmengine.{package}\n\n| name | parameters | differences |\n|---|---|---|\n")
        for path, entry, notes in entries:
            name = path.removeprefix(f"mmengine.{package}.")
            shown = f"`{entry['parameters']}`" if entry["parameters"] else ""
            lines.append(f"| `{name}` | {shown} | {'; '.join(notes)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
