"""Inference on files and arrays."""

from slipstream.openmmlab.mmengine.infer.infer import BaseInferencer

__all__ = ["BaseInferencer"]
