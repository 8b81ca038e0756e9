"""`slipstream doctor`: report the machine, versions, devices, options and misconfigurations."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from slipstream.cli.configure import load_config
from slipstream.cli.doctor_checks import NO, OK, WARN, Machine, Row, inspect_machine, problems
from slipstream.cores import cores
from slipstream.devices import default_device
from slipstream.dist import infer_launcher
from slipstream.dist.placement import read_placement
from slipstream.errors import DistributedError
from slipstream.runner.environment import collect_env

__all__ = ["run"]

_EXTRAS = {
    "images": "PIL",
    "recipes": "hydra",
    "plots": "matplotlib",
    "tensorboard": "tensorboard",
    "metrics": "torchmetrics",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "toml": "tomli_w",
    "png": "imagecodecs",
    "jpeg": "simplejpeg",
    "video": "av",
    "export": "onnxruntime",
    "openvino": "openvino",
}
_STATES = {OK: "ok", NO: "not available", WARN: "warning"}
_GAINS = {"png": " for faster PNG decoding (docs/performance.md)"}


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if something is misconfigured."""
    device = default_device()
    machine = inspect_machine(device, _recipe_workers(args))
    sections = {
        "Machine": [(OK, name, str(value)) for name, value in collect_env().items()],
        "Packages": list(_packages()),
        "Options": list(_options(device, machine)),
        "Distributed": list(_distributed(device)),
        "Configuration": list(problems(machine)) or [(OK, "no problems found", "")],
    }
    if args.json:
        print(
            json.dumps({title: [_as_dict(row) for row in rows] for title, rows in sections.items()}, indent=1)
        )
    for title, rows in sections.items() if not args.json else ():
        print(title)
        width = max(len(name) for _, name, _ in rows)
        for mark, name, text in rows:
            print(f"  {mark}  {name:{width}}  {text}".rstrip())
    return int(any(mark == WARN for rows in sections.values() for mark, _, _ in rows))


def _as_dict(row: Row) -> dict[str, str]:
    mark, name, text = row
    return {"state": _STATES[mark], "name": name, "text": text}


def _recipe_workers(args: argparse.Namespace) -> dict[str, int]:
    """Return the recipe's integer `num_workers` values by config path, or an empty dict if no recipe is given."""
    if args.config is None:
        return {}
    cfg = load_config(args.config, args.overrides, args.config_dir, bool(args.trust)).cfg
    paths = {f"{split}_dataloader": cfg.get(f"{split}_dataloader") for split in ("train", "val")}
    counts = {f"{path}.num_workers": loader.get("num_workers", 0) for path, loader in paths.items() if loader}
    return {path: count for path, count in counts.items() if isinstance(count, int)}


def _packages() -> Iterator[Row]:
    for name in ("slipstream", "torch", "numpy"):
        try:
            yield OK, name, version(name)
        except PackageNotFoundError:
            yield WARN, name, "not installed: pip install slipstream"
    for extra, module in _EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        yield (
            (OK, module, "installed")
            if installed
            else (NO, module, f"optional: pip install 'slipstream[{extra}]'{_GAINS.get(extra, '')}")
        )


def _options(device: torch.device, machine: Machine) -> Iterator[Row]:
    for name in ("bfloat16", "float16"):
        problem = _autocast_problem(device, getattr(torch, name))
        mark, text = (OK, f"AmpOptimWrapper, dtype='{name}'") if problem is None else (NO, problem)
        yield mark, f"mixed precision {name}", text
    yield _compile(machine)
    yield OK, "EMA, gradient accumulation, gradient clipping", "supported on every device"
    npu = importlib.util.find_spec("torch_npu") is not None
    yield (
        (OK if npu else NO),
        "NpuFused* optimizers",
        "torch_npu" if npu else "pure PyTorch implementation (torch_npu is not installed)",
    )


def _compile(machine: Machine) -> Row:
    if machine.inductor_problem is not None:
        return NO, "compile", "not supported; see below"
    compiler = f" with {machine.compiler}" if machine.compiler else ""
    return OK, "compile", f"cfg=dict(compile=True), backend inductor{compiler}"


def _distributed(device: torch.device) -> Iterator[Row]:
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    masks = [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]
    yield OK, "devices", ", ".join([f"{count} {device.type}" if count else "cpu", *map(_setting, masks)])
    backends = [name for name in ("nccl", "gloo", "mpi", "xccl", "hccl") if _has_backend(name)]
    if backends:
        yield OK, "backends", ", ".join(backends)
    else:
        yield NO, "backends", "this build of torch does not include torch.distributed"
    yield _launcher()
    on_cores = f"{cores()} core{'s' * (cores() != 1)}"
    yield OK, "threads", f"{torch.get_num_threads()} on {on_cores}, {_setting('OMP_NUM_THREADS')}"


def _has_backend(name: str) -> bool:
    return dist.is_available() and dist.is_backend_available(name)


def _launcher() -> Row:
    launcher = infer_launcher()
    if launcher == "none":
        return (
            OK,
            "launcher",
            "not started by a launcher; to start several processes, use train --nproc N, submit, or train "
            "--launcher with torchrun, srun or mpirun",
        )
    try:
        placement = read_placement(launcher, os.environ)
    except DistributedError as error:
        return WARN, "launcher", str(error)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return OK, "launcher", ", ".join([launcher, *map(placement.describe, names)])


def _setting(name: str) -> str:
    return f"{name}={os.environ[name]}" if name in os.environ else f"{name} not set"


def _autocast_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Multiply two matrices under autocast. Return the error message, or None on success."""
    try:
        with torch.autocast(device.type, dtype=dtype):
            a = torch.ones(8, 8, device=device)
            supported = (a @ a).dtype == dtype
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None if supported else f"autocast on {device.type} does not support {dtype}"
