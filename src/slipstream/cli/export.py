"""`slipstream export` writes a trained model as an ONNX or torch.export file, or its weights as a safetensors file.

`slipstream consolidate` writes a sharded checkpoint as one file.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.checkpoint import consolidate, load_checkpoint, save_checkpoint, weights_in
from slipstream.cli.trained import find_checkpoint, load_trained
from slipstream.dataset.transforms.geometry import Affine, SegConvertToTensor
from slipstream.dataset.transforms.image_transforms import Normalize, ToTensor, read_transforms
from slipstream.dataset.transforms.pipeline import normalization
from slipstream.errors import ConfigError, ModelError
from slipstream.extras import extra
from slipstream.files import write_text
from slipstream.model import BaseDataPreprocessor, ImgDataPreprocessor, Segmentor
from slipstream.model.tasks import Task, main_output

_SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
# Maximum accepted difference in a score, relative to the largest score.
_TOLERANCE = 1e-3
# Size above which the weights are written to a second file, because an ONNX file is limited to 2 GB.
_MAX_ONNX_BYTES = 1.8e9
# Validation transforms that the exported model includes.
_INCLUDED = (Affine, SegConvertToTensor, ToTensor, Normalize)


def run(args: argparse.Namespace) -> int:
    """Write the file, and compare its output with the model's. The file is not kept if the scores or classes differ."""
    if args.to == "safetensors":
        return _export_weights(find_checkpoint(args.run), args.out)
    trained = load_trained(find_checkpoint(args.run), args.config, bool(args.trust), torch.device("cpu"))
    suffix = _SUFFIXES[args.to]
    out = Path(args.out) if args.out else trained.path.with_suffix(suffix)
    if out.suffix != suffix or not out.absolute().parent.is_dir():
        raise ConfigError(f"must be a file in an existing folder and end with {suffix}, not '{out}'", "--out")
    params = _normalization(trained.transforms)
    network = _ExportedNetwork(trained.model, params).eval()
    shape = args.shape or (_channels(trained.model), 256, 256)
    dynamic = len(shape) == 3 and not args.fixed_size
    if dynamic and network.divisor > 1:
        raise ConfigError("is required, because pad_size_divisor depends on the size", "--fixed-size")
    checks = _check_inputs(shape, dynamic)
    print(f"Checkpoint: {trained.description}")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.absolute().parent) as folder:
        file = Path(folder) / out.name
        load = (_write_onnx if args.to == "onnx" else _write_torch)(network, checks[0], dynamic, file)
        difference = _largest_difference(load, network, trained.model, params, checks)
        pairs = zip(trained.transform_configs, trained.transforms, strict=True)
        sizes = ["N", shape[0], "H", "W"] if dynamic else ["N", *shape]
        content = {
            "checkpoint": str(trained.path),
            "input": {"name": "images", "dtype": "float32", "shape": sizes},
            "values": "RGB, 0 to 255" if network.normalizes else "as the network expects them",
            "output": "scores; the class is the index of the largest score in dimension 1, or 1 where a single "
            "score is at least 0",
            "classes": list(trained.classes),
            "palette": trained.palette,
            "transforms_before": [config for config, built in pairs if not isinstance(built, _INCLUDED)],
            "largest_difference": difference,
        }
        write_text(file.with_name(f"{out.name}.json"), json.dumps(content, indent=1, default=str) + "\n")
        for written in sorted(Path(folder).iterdir()):
            written.replace(out.absolute().parent / written.name)
    print(f"Largest difference from the model's output: {difference:.1e} times the largest score")
    size = "any height and width" if dynamic else f"inputs of {'x'.join(map(str, shape))}"
    print(f"Written: {out} and {out}.json (any batch size, {size})")
    return 0


def _export_weights(path: Path, out: str | None) -> int:
    """Write the weights of a checkpoint's network."""
    target = Path(out) if out else path.with_suffix(".safetensors")
    if target.suffix != ".safetensors":
        raise ConfigError(f"must end with .safetensors, not '{out}'", "--out")
    weights = weights_in(load_checkpoint(path), path)
    network = {
        name.removeprefix("network."): value for name, value in weights.items() if name.startswith("network.")
    }
    save_checkpoint({"state_dict": network or weights}, target, print)
    print(f"Written: {target} ({len(network or weights)} tensors of {path})")
    return 0


def consolidate_folder(args: argparse.Namespace) -> int:
    """Write a sharded checkpoint as one file. The default path is next to the checkpoint folder."""
    folder = Path(args.folder)
    out = Path(args.out) if args.out else folder.with_suffix(".pth")
    consolidate(folder, out)
    print(f"{folder} -> {out}")
    return 0


class _ExportedNetwork(nn.Module):
    """The computation from pixels to scores: normalization, padding, the network, and the resize to the image size.

    Args:
        model: the trained model.
        params: normalization from the dataset's transforms, float32 (6,): the scales of all channels, followed by the
            shifts. None if the transforms do not normalize.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, params: Tensor | None) -> None:
        super().__init__()
        self.model = model.network if isinstance(model, Task) else _TensorModel(model)
        self.is_segmentor = isinstance(model, Segmentor)
        preprocessor = getattr(model, "data_preprocessor", None)
        if type(preprocessor) not in (ImgDataPreprocessor, BaseDataPreprocessor, type(None)):
            raise ModelError(
                f"models whose data preprocessor is a {type(preprocessor).__name__} cannot be exported; use "
                "ImgDataPreprocessor or BaseDataPreprocessor"
            )
        images = preprocessor if isinstance(preprocessor, ImgDataPreprocessor) else ImgDataPreprocessor()
        scale, shift = 1 / images.std, -images.mean / images.std
        if params is not None:
            scale, shift = params.view(2, -1, 1, 1)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.flips_channels, self.divisor = images.flips_channels, images.pad_size_divisor
        self.normalizes = self.flips_channels or bool((scale != 1).any() or (shift != 0).any())
        self.pad_value = images.pad_value

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores for float32 images (N, C, H, W) in the range 0 to 255.

        Inputs with a different number of dimensions are passed to the network unchanged.
        """
        if images.ndim != 4:
            return main_output(self.model(images))
        inputs = (images.flip(-3) if self.flips_channels else images) * self.scale + self.shift
        height, width = images.shape[-2:]
        if self.divisor > 1:
            padding = (0, -width % self.divisor, 0, -height % self.divisor)
            inputs = F.pad(inputs, padding, value=self.pad_value)
        scores = main_output(self.model(inputs))
        if not (self.is_segmentor and scores.ndim == 4):
            return scores
        scores = F.interpolate(scores, inputs.shape[-2:], mode="bilinear")
        return scores[..., :height, :width] if self.divisor > 1 else scores


class _TensorModel(nn.Module):
    """A custom model, called with `mode="tensor"`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        return self.model(inputs, mode="tensor")


def _normalization(transforms: Sequence[Any]) -> Tensor | None:
    if any(isinstance(transform, ToTensor | Normalize) for transform in transforms):
        return read_transforms(transforms)[1]
    params = normalization([t for t in transforms if isinstance(t, Affine | SegConvertToTensor)])
    return None if params is None else torch.from_numpy(params)


def _channels(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    raise ConfigError(
        "is required, because the model has no convolution; set it to one input's shape", "--shape"
    )


def _check_inputs(shape: Sequence[int], dynamic: bool) -> list[Tensor]:
    """Return two batches of different sizes, with pixel values from 0 to 255."""
    generator = torch.Generator().manual_seed(0)
    other = [shape[0], shape[1] + 128, shape[2] + 64] if dynamic else shape
    return [torch.randint(256, size, generator=generator).float() for size in ((2, *shape), (1, *other))]


def _graph(module: nn.Module, example: Tensor, dynamic: bool) -> Any:
    """Export a module to a graph that accepts any batch size and, if `dynamic` is True, any height and width."""
    sizes = dict.fromkeys((0, 2, 3) if dynamic else (0,), torch.export.Dim.DYNAMIC)
    with _convert_errors("the model cannot be captured as a graph"), torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes={"images": sizes})


def _write_torch(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> Callable[[Tensor], Tensor]:
    torch.export.save(_graph(module, example, dynamic), file)
    return torch.export.load(file).module()


def _write_onnx(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> Callable[[Tensor], Tensor]:
    with extra("export"):
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401

    size = sum(value.numel() * value.element_size() for value in module.state_dict().values())
    graph = _graph(module, example, dynamic)
    with _convert_errors("the graph cannot be converted to ONNX"):
        torch.onnx.export(
            graph, (example,), str(file), dynamo=True, input_names=["images"], output_names=["scores"],
            opset_version=18, external_data=size > _MAX_ONNX_BYTES, verbose=False,
        )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal errors only; onnxruntime also raises its errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextmanager
def _convert_errors(message: str) -> Iterator[None]:
    """Suppress warnings from the converters, and convert their errors to one-line errors."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # the converters raise many types of errors
        line = (str(error).strip().splitlines() or [""])[0]
        hint = "try --fixed-size, a different --shape, or a different format"
        raise ModelError(f"{message}: {type(error).__name__}: {line}; {hint}") from error
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _largest_difference(
    load: Callable[[Tensor], Tensor], network: nn.Module, model: Any, params: Tensor | None,
    checks: Sequence[Tensor],
) -> float:  # fmt: skip
    """Return the largest difference in any score, relative to the largest score in the batch.

    Raises:
        ModelError: the difference exceeds the tolerance, or the predicted classes differ.
    """
    largest = 0.0
    for images in checks:
        expected = network(images)
        with _convert_errors(f"the exported file does not accept inputs of shape {tuple(images.shape)}"):
            actual = load(images)
        scale = max(float(expected.abs().max()), 1e-12)
        same_shape = actual.shape == expected.shape
        difference = float((actual - expected).abs().max()) / scale if same_shape else float("inf")
        largest = max(largest, difference)
        if not difference <= _TOLERANCE:
            raise ModelError(
                f"the exported file's output for an input of shape {tuple(images.shape)} differs from the model's by "
                f"{difference:.1e} times the largest score; use a different format, or --fixed-size"
            )
        if isinstance(model, Task):
            _check_predictions(model, params, images, actual, _TOLERANCE * scale)
    return largest


def _check_predictions(
    model: Any, params: Tensor | None, images: Tensor, scores: Tensor, tolerance: float
) -> None:
    """Compare the scores with validation predictions, which use the data preprocessor and the model's own resize."""
    batch: dict[str, Tensor] = {"inputs": images}
    if params is not None:
        batch["device_params"] = params.expand(len(images), -1)
    if scores.ndim == 4:
        batch["targets"] = torch.zeros((len(images), *images.shape[-2:]), dtype=torch.long)
    predicted = model.val_step(batch)["preds"]
    if predicted.shape == scores.shape:
        error = (predicted - scores).abs().max()
    elif scores.shape[1] == 1:  # a segmentor: class 1 where the score is at least 0
        error = (scores[:, 0].abs() * (predicted != (scores[:, 0] >= 0))).max()
    else:  # class ids; several classes may have nearly the same score
        error = (scores.amax(1) - scores.gather(1, predicted[:, None])[:, 0]).abs().max()
    if not float(error) <= tolerance:
        raise ModelError(
            "the exported model and validation predict different classes; use a different format"
        )
