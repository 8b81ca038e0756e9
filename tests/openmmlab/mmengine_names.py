"""Record the public names of the installed MMEngine in `mmengine_names.json`.

Run `python tests/openmmlab/mmengine_names.py`. The names are stored in a file because MMEngine is not installed in the
environment in which docs/mmengine_api.md is tested.
"""

import importlib
import inspect
import json
import pkgutil
import warnings
from pathlib import Path

DATA = Path(__file__).parent / "mmengine_names.json"
OWN = "slipstream.openmmlab."


def parameters(obj):
    """Return the parameters of a function or a constructor as text, such as `a, b=, *args`."""
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(
        stars.get(p.kind, "") + p.name + ("=" if p.default is not p.empty else "")
        for p in signature.parameters.values()
    )


def members(cls):
    """Return the public methods and properties that MMEngine defines in a class."""
    found = set()
    for kind in cls.__mro__:
        if kind.__module__.split(".")[0] == "mmengine":
            found |= {
                name
                for name, value in vars(kind).items()
                if not name.startswith("_")
                and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
            }
    return sorted(found)


def public_names(module):
    """Return the names in `__all__`, or the functions and classes that the module defines if it has no `__all__`."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, obj in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(obj) or inspect.isfunction(obj))
        and obj.__module__ == module.__name__
    ]


def modules(package):
    """Return the package and its public submodules that can be imported."""
    found = [package]
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if not any(part.startswith("_") for part in info.name.split(".")[1:]):
            try:
                found.append(importlib.import_module(info.name))
            except ImportError as error:
                print(f"{info.name} is omitted because it cannot be imported: {error}")
    return found


def record():
    """Return MMEngine's version, modules and public names. The key of a name is its shortest path in a subpackage."""
    import mmengine

    where, objects = {}, {}
    for module in modules(mmengine):
        for name in public_names(module):
            obj = getattr(module, name)
            # An object in several modules is recorded once. Constants without `__dict__` are compared by their repr.
            key = (name, id(obj) if hasattr(obj, "__dict__") else repr(obj))
            objects[key] = obj
            where.setdefault(key, []).append(module.__name__)
    result = {}
    for key, paths in where.items():
        name, obj = key[0], objects[key]
        first, *others = sorted(set(paths), key=lambda path: (path == "mmengine", path.count("."), path))
        if str(getattr(obj, "__module__", "mmengine")).split(".")[0] == "mmengine":
            entry = {"at": others, "parameters": parameters(obj) if callable(obj) else None}
            if inspect.isclass(obj):
                entry["members"] = members(obj)
            result[f"{first}.{name}"] = entry
    return {
        "version": mmengine.__version__,
        "modules": sorted(m.__name__ for m in modules(mmengine)),
        "names": dict(sorted(result.items())),
    }


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = record()
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["names"].items()]
    DATA.write_text(
        f'{{"version": {json.dumps(content["version"])},\n"modules": {json.dumps(content["modules"])},\n"names": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )
