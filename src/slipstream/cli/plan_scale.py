"""`slipstream plan-scale`: predict the time of a training step on many GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.apps.scaling import (
    GPUS,
    NETWORKS,
    Cluster,
    Model,
    Prediction,
    Strategy,
    best,
    describe,
    make_cluster,
    predict,
    segformer_1b,
)
from slipstream.apps.scaling.presets import SUSTAINED_FLOPS, SUSTAINED_LINK
from slipstream.cli.tables import print_table
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.recipes import find_recipe, recipes

__all__ = ["run"]

_DEFAULT_SIZE, _DEFAULT_BATCH = (768, 768), 8
_HEADER = (
    "GPUs", "best", "step ms", "samples/s", "eff.", "exposed ms", "wait ms", "GB", "DDP ms", "HSDP ms", "FSDP2 ms",
)  # fmt: skip
_FORMULAS = {"segformer_1b": segformer_1b}


def run(args: argparse.Namespace) -> int:
    """Print a prediction for each number of GPUs, followed by the assumptions."""
    model, size, batch = _model(args.model, args.size, args.batch_per_gpu, bool(args.trust))
    gpu, network = _preset("gpu", args.gpu, GPUS), _preset("network", args.network, NETWORKS)
    clusters = [make_cluster(gpu, network, n, args.gpus_per_node) for n in args.gpus]
    results = [_predict(model, cluster, batch, args) for cluster in clusters]
    if args.json:
        print(json.dumps([_as_json(predictions) for predictions in results], indent=1))
        return 0
    print(
        f"{model.name}: {model.parameters / 1e6:,.1f} million parameters, {size[0]} x {size[1]} pixels, "
        f"{model.flops / 1e9:,.1f} GFLOP forward; {batch} sample{'s' * (batch != 1)} per GPU"
    )
    print_table(_HEADER, map(list, map(_cells, results)), 110, right=[n for n in _HEADER if n != "best"])
    print(_assumptions(args))
    return 0


def _model(
    name: str, size: tuple[int, int] | None, batch: int | None, trust: bool
) -> tuple[Model, tuple[int, int], int]:
    """Return the model for a recipe or network, the image height and width, and the batch size per GPU."""
    if name in _FORMULAS:
        size = size or _DEFAULT_SIZE
        return _FORMULAS[name](*size), size, batch or _DEFAULT_BATCH
    import torch

    from slipstream.registry import MODELS

    if name in recipes() or Path(name).suffix:
        network, own_size, own_batch = _read_recipe(name, trust)
        size, batch = size or own_size, batch or own_batch
    elif MODELS.get(name) is not None:
        network = {"type": name}
    else:
        known = [*recipes(), *MODELS.module_dict, *_FORMULAS]
        raise UnknownNameError(f"no recipe or network is named '{name}'{did_you_mean(name, known)}")
    with torch.device("meta"):
        module = MODELS.build(network)
    size = size or _DEFAULT_SIZE
    return describe(module, (3, *size), name), size, batch or _DEFAULT_BATCH


def _read_recipe(name: str, trust: bool) -> tuple[Any, tuple[int, int] | None, int | None]:
    from slipstream.cli.configure import load_config

    cfg = load_config(name, trust=trust).cfg
    network = (cfg.get("model") or {}).get("network")
    if network is None:
        raise ConfigError(f"{find_recipe(name)} has no 'model.network'; use a network name instead")
    loader = cfg.get("train_dataloader") or {}
    return network, _image_size(loader.get("dataset") or {}), loader.get("batch_size")


def _image_size(dataset: Any) -> tuple[int, int] | None:
    """Return the crop size (height, width) of the last cropping transform, or the dataset's image size, if known."""
    for transform in reversed(dataset.get("transforms") or []):
        if crop := transform.get("crop_size"):
            width, height = (crop, crop) if isinstance(crop, int) else crop
            return height, width
    return tuple(dataset["size"]) if dataset.get("size") else None


def _preset(kind: str, name: str, presets: dict[str, Any]) -> Any:
    if name not in presets:
        hint = did_you_mean(name, presets)
        raise UnknownNameError(f"unknown {kind} '{name}'{hint} (choose from {', '.join(presets)})")
    return presets[name]


def _predict(model: Model, cluster: Cluster, batch: int, args: argparse.Namespace) -> list[Prediction]:
    return [
        predict(model, cluster, Strategy(kind, sync_bn=not args.no_sync_bn), batch, args.step_time)
        for kind in ("ddp", "hsdp", "fsdp2")
        if kind != "hsdp" or 1 < cluster.local < cluster.gpus  # otherwise HSDP equals DDP or FSDP2
    ]


def _cells(predictions: list[Prediction]) -> Iterator[str]:
    chosen, by_kind = best(predictions), {p.strategy.kind: p for p in predictions}
    yield f"{chosen.cluster.gpus:,}"
    if chosen.fits:
        yield chosen.strategy.kind
        yield _ms(chosen.step_time)
        yield f"{chosen.samples_per_second:,.0f}"
        yield f"{chosen.efficiency:.0%}"
        yield _ms(chosen.exposed)
        yield _ms(chosen.waiting)
    else:
        yield from ("none fits", *["–"] * 5)
    yield f"{chosen.memory / 1e9:.1f}"
    for kind in ("ddp", "hsdp", "fsdp2"):
        prediction = by_kind.get(kind)
        yield "–" if prediction is None else _ms(prediction.step_time) if prediction.fits else "too big"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _as_json(predictions: list[Prediction]) -> dict[str, Any]:
    return {
        "gpus": predictions[0].cluster.gpus,
        "best": best(predictions).strategy.kind if best(predictions).fits else None,
        **{
            p.strategy.kind: {
                "step_time": p.step_time,
                "samples_per_second": p.samples_per_second,
                "efficiency": p.efficiency,
                "exposed": p.exposed,
                "waiting": p.waiting,
                "bytes_sent": p.sent,
                "memory": p.memory,
                "fits": p.fits,
            }
            for p in predictions
        },
    }


def _assumptions(args: argparse.Namespace) -> str:
    gpu, network = GPUS[args.gpu], NETWORKS[args.network]
    scope = "per GPU" if network.per_gpu else "per node"
    compute = (
        f"{args.step_time * 1e3:g} ms per step, as measured on one GPU"
        if args.step_time
        else f"{SUSTAINED_FLOPS:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s, "
        f"or {SUSTAINED_LINK:.0%} of {gpu.memory_bandwidth / 1e12:g} TB/s, whichever takes longer"
    )
    noise = Strategy("ddp").noise
    norm = "per GPU" if args.no_sync_bn else "over all GPUs"
    return (
        f"Compute: {compute}. Links: {SUSTAINED_LINK:.0%} of {gpu.link_bandwidth / 1e9:g} GB/s within a node "
        f"of {args.gpus_per_node} GPUs,\nand {SUSTAINED_LINK:.0%} of {network.bandwidth * 8 / 1e9:g} Gb/s {scope} "
        f"between nodes. Activations and gathered parameters are bf16, and reductions are float32.\n"
        f"The optimizer is Adam. BatchNorm statistics are computed {norm}. "
        f"The step time of each GPU varies by {noise:.0%}.\nThe input pipeline is assumed to be fast enough. "
        f"These are predictions, not measurements; see docs/scaling.md."
    )
