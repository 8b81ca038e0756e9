"""Write and load files in the formats that `slipstream export` supports."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.extras import extra

__all__ = ["FORMATS", "Format", "convert_errors"]

_OPSET = 18
_MAX_FILE_BYTES = 1.8e9
"""Size in bytes above which the weights are written to a second file, because an ONNX file is limited to 2 GB."""


class Format(NamedTuple):
    """A file format."""

    suffix: str
    write: Callable[[nn.Module, Tensor, bool, Path], None]
    """Write a module to a file, given an example input and whether the height and width of inputs may vary."""
    load: Callable[[Path], Callable[[Tensor], Tensor]]


def _export(module: nn.Module, example: Tensor, dynamic: bool) -> Any:
    """Export a module to a graph that accepts any batch size and, if `dynamic` is True, any height and width."""
    sizes = {0: torch.export.Dim.DYNAMIC}
    if dynamic:
        sizes.update({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC})
    with convert_errors("the model cannot be captured as a graph"), torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes={"images": sizes})


def _write_torch(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> None:
    torch.export.save(_export(module, example, dynamic), file)


def _load_torch(file: Path) -> Callable[[Tensor], Tensor]:
    module: Callable[[Tensor], Tensor] = torch.export.load(file).module()
    return module


def _write_torchscript(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> None:
    with convert_errors("the model cannot be traced"), torch.no_grad():
        torch.jit.trace(module, example, check_trace=False).save(str(file))


def _load_torchscript(file: Path) -> Callable[[Tensor], Tensor]:
    with convert_errors("the exported file cannot be loaded"):
        module: Callable[[Tensor], Tensor] = torch.jit.load(str(file))
    return module


def _write_onnx(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> None:
    with extra("export"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401

    size = sum(value.numel() * value.element_size() for value in module.state_dict().values())
    graph = _export(module, example, dynamic)
    with convert_errors("the graph cannot be converted to ONNX"):
        torch.onnx.export(
            graph,
            (example,),
            str(file),
            dynamo=True,
            input_names=["images"],
            output_names=["scores"],
            opset_version=_OPSET,
            external_data=size > _MAX_FILE_BYTES,
            verbose=False,
        )


def _load_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    with extra("export"):
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal errors only; onnxruntime also raises its errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _write_openvino(module: nn.Module, example: Tensor, dynamic: bool, file: Path) -> None:
    with extra("openvino"):
        import openvino

    onnx_file = file.with_suffix(".onnx")
    _write_onnx(module, example, dynamic, onnx_file)
    with convert_errors("the ONNX graph cannot be converted to OpenVINO"):
        openvino.save_model(openvino.convert_model(onnx_file), file, compress_to_fp16=False)
    for written in file.parent.glob(f"{onnx_file.name}*"):
        written.unlink()


def _load_openvino(file: Path) -> Callable[[Tensor], Tensor]:
    with extra("openvino"):
        import openvino

    # By default, OpenVINO computes in bfloat16 on some processors.
    options: Mapping[str, str] = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", options)
    return lambda images: torch.from_numpy(compiled([images.numpy()])[0])


@contextmanager
def convert_errors(message: str) -> Iterator[None]:
    """Suppress warnings from the converters, and convert their errors to one-line errors.

    Raises:
        ModelError: the block raised an exception.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # the converters raise many types of errors
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(
            f"{message}: {type(error).__name__}: {lines[0] if lines else ''}. Try --fixed-size, a different --shape, "
            "or a different format"
        ) from error
    finally:
        logger.setLevel(level)


FORMATS: Mapping[str, Format] = {
    "onnx": Format(".onnx", _write_onnx, _load_onnx),
    "torch": Format(".pt2", _write_torch, _load_torch),
    "torchscript": Format(".pt", _write_torchscript, _load_torchscript),
    "openvino": Format(".xml", _write_openvino, _load_openvino),
}
