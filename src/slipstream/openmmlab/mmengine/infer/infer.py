"""`BaseInferencer`, the base class for inference on files and arrays."""

from __future__ import annotations

import copy
import re
import time
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from slipstream.config import Config as OwnConfig
from slipstream.errors import BuildError, ConfigError
from slipstream.logging import print_log
from slipstream.openmmlab.mmengine.config import Config, ConfigDict
from slipstream.openmmlab.mmengine.config.metafile import iter_models, repo_or_mim_folder
from slipstream.openmmlab.mmengine.config.saved_text import saved_config
from slipstream.openmmlab.mmengine.dataset import pseudo_collate
from slipstream.openmmlab.mmengine.device import get_device
from slipstream.openmmlab.mmengine.fileio import isdir, join_path, list_dir_or_file
from slipstream.openmmlab.mmengine.registry import FUNCTIONS, MODELS, VISUALIZERS, DefaultScope
from slipstream.openmmlab.mmengine.runner.checkpoint import _load_checkpoint, _load_checkpoint_to_model
from slipstream.openmmlab.mmengine.structures import InstanceData
from slipstream.openmmlab.mmengine.utils import ProgressBar
from slipstream.openmmlab.mmengine.visualization import Visualizer

__all__ = [
    "BaseInferencer",
    "ConfigType",
    "ImgType",
    "InferencerMeta",
    "InputType",
    "InputsType",
    "InstanceList",
    "ModelType",
    "ResType",
]

InstanceList = list[InstanceData]
InputType = str | np.ndarray | torch.Tensor
InputsType = InputType | Sequence[InputType]
ImgType = np.ndarray | Sequence[np.ndarray]
ResType = dict[str, Any] | list[dict[str, Any]]
ConfigType = OwnConfig | ConfigDict
ModelType = dict[str, Any] | ConfigType | str

_STAGES = ("preprocess", "forward", "visualize", "postprocess")


class InferencerMeta(ABCMeta):
    """Metaclass that checks that each argument of an inferencer belongs to only one stage."""

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        owner: dict[str, str] = {}
        for stage in _STAGES:
            names = getattr(cls, f"{stage}_kwargs")
            assert isinstance(names, set), f"{cls.__name__}.{stage}_kwargs must be a set, not {names!r}"
            for name in names:
                assert name not in owner, (
                    f"{cls.__name__} has '{name}' in {owner[name]}_kwargs and {stage}_kwargs; remove it from one "
                    "of them"
                )
                owner[name] = stage


class BaseInferencer(metaclass=InferencerMeta):
    """Base class for inferencers, which preprocess inputs, run a model, and visualize and return its predictions.

    Subclasses define `_init_pipeline`, `visualize` and `postprocess`. The sets `preprocess_kwargs`, `forward_kwargs`,
    `visualize_kwargs` and `postprocess_kwargs` contain the names of the call arguments that each stage receives.

    Args:
        model: a configuration, a configuration file, or the name of a model in the metafiles of the installed library
            `scope`. If None, the configuration is read from the checkpoint.
        weights: path or URL of a checkpoint. Default: the checkpoint listed in the metafile if `model` is the name of a
            model, otherwise no checkpoint.
        device: the device. Default: the accelerator if one is available, otherwise the CPU.
        scope: the registry scope to search first. Default: the current scope.
        show_progress: show a progress bar.

    Raises:
        ConfigError: if the model is unknown, or neither `model` nor `weights` is set.
    """

    preprocess_kwargs: ClassVar[set[str]] = set()
    forward_kwargs: ClassVar[set[str]] = set()
    visualize_kwargs: ClassVar[set[str]] = set()
    postprocess_kwargs: ClassVar[set[str]] = set()

    def __init__(
        self,
        model: ModelType | None = None,
        weights: str | None = None,
        device: str | None = None,
        scope: str | None = None,
        show_progress: bool = True,
    ) -> None:
        if scope is None and (current := DefaultScope.get_current_instance()) is not None:
            scope = current.scope_name
        self.scope = scope
        cfg, weights = self._read_model(model, weights)
        self.model = self._init_model(cfg, weights, get_device() if device is None else device)
        self.pipeline = self._init_pipeline(cfg)
        self.collate_fn = self._init_collate(cfg)
        self.visualizer = self._init_visualizer(cfg)
        self.cfg = cfg
        self.show_progress = show_progress

    def _read_model(self, model: Any, weights: str | None) -> tuple[Any, str | None]:
        """Return the configuration and the checkpoint."""
        if model is None:
            if weights is None:
                raise ConfigError("is required if no model is passed; set it to a checkpoint path", "weights")
            return ConfigDict(), weights
        if isinstance(model, OwnConfig | ConfigDict):
            return copy.deepcopy(model), weights
        if isinstance(model, Mapping):
            return copy.deepcopy(ConfigDict(model)), weights
        if not isinstance(model, str):
            raise BuildError(
                f"must be a path, a model name or a configuration, not {type(model).__name__}", "model"
            )
        if Path(model).is_file():
            return Config.fromfile(model), weights
        cfg, default_weights = self._load_model_from_metafile(model)
        return cfg, default_weights if weights is None else weights

    def __call__(
        self, inputs: InputsType, return_datasamples: bool = False, batch_size: int = 1, **kwargs: Any
    ) -> Any:
        """Run inference on the inputs, and return the result of `postprocess`.

        Args:
            inputs: a path, an array, a tensor, a list of these, or a folder.
            return_datasamples: passed to `postprocess`.
            batch_size: number of inputs in each call to the model.
            **kwargs: arguments for the stages.

        Raises:
            ConfigError: if an argument does not belong to any stage.
        """
        preprocess_kwargs, forward_kwargs, visualize_kwargs, postprocess_kwargs = self._dispatch_kwargs(
            **kwargs
        )
        items = self._inputs_to_list(inputs)
        batches = self.preprocess(items, batch_size=batch_size, **preprocess_kwargs)
        count = -(-len(items) // batch_size)
        predictions: list[Any] = []
        for batch in _with_progress(batches, count) if self.show_progress else batches:
            predictions.extend(self.forward(batch, **forward_kwargs))
        visualization = self.visualize(items, predictions, **visualize_kwargs)
        return self.postprocess(predictions, visualization, return_datasamples, **postprocess_kwargs)

    def _inputs_to_list(self, inputs: InputsType) -> list[Any]:
        """Return the inputs as a list; a folder is replaced by its files."""
        if isinstance(inputs, str) and isdir(inputs):
            names = list_dir_or_file(inputs, list_dir=False)
            return [join_path(inputs, name) for name in names]
        return list(inputs) if isinstance(inputs, list | tuple) else [inputs]

    def preprocess(self, inputs: Any, batch_size: int = 1, **kwargs: Any) -> Iterator[Any]:
        """Yield the batches that `forward` receives."""
        yield from map(self.collate_fn, self._get_chunk_data(map(self.pipeline, inputs), batch_size))

    @torch.no_grad()
    def forward(self, inputs: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch."""
        return self.model.test_step(inputs)

    @abstractmethod
    def visualize(self, inputs: list[Any], preds: Any, show: bool = False, **kwargs: Any) -> Any:
        """Return visualizations of the predictions.

        Args:
            inputs: the list of inputs.
            preds: the predictions.
            show: display the visualizations.
            **kwargs: the call arguments listed in `visualize_kwargs`.
        """

    @abstractmethod
    def postprocess(
        self, preds: Any, visualization: Any, return_datasample: bool = False, **kwargs: Any
    ) -> Any:
        """Return the inference result, usually a dict with the keys `predictions` and `visualization`.

        Args:
            preds: the predictions.
            visualization: the return value of `visualize`.
            return_datasample: return data elements instead of built-in types.
            **kwargs: the call arguments listed in `postprocess_kwargs`.
        """

    @abstractmethod
    def _init_pipeline(self, cfg: Any) -> Callable[[Any], Any]:
        """Return a function that preprocesses one input."""

    def _load_model_from_metafile(self, model: str) -> tuple[Any, str | None]:
        """Return the configuration and the weights URL of a model in the library's metafiles."""
        if self.scope is None:
            raise ConfigError(
                f"is required to find the model '{model}'; set it to the name of its library, for example "
                f"scope='mmdet'",
                "scope",
            )
        folder = self._get_repo_or_mim_dir(self.scope)
        for entry in self._get_models_from_metafile(folder):
            if model.lower() in [name.lower() for name in _names(entry)]:
                weights = entry.get("Weights")
                return (
                    Config.fromfile(Path(folder) / entry["Config"]),
                    weights[0] if isinstance(weights, list) else weights,
                )
        raise ConfigError(
            f"'{model}' is neither a file nor a model in the metafiles of {self.scope}; see "
            f"{type(self).__name__}.list_models('{self.scope}')",
            "model",
        )

    @staticmethod
    def _get_repo_or_mim_dir(scope: str) -> str:
        return str(repo_or_mim_folder(scope))

    @staticmethod
    def _get_models_from_metafile(dir: str) -> Iterator[dict[str, Any]]:
        return iter_models(Path(dir))

    @staticmethod
    def list_models(scope: str | None = None, patterns: str = r".*") -> list[str]:
        """Return and log the model names that match a regular expression.

        The names are read from a library's metafiles.

        Raises:
            ConfigError: if no scope is set, or the library is unknown, is not installed or has no configurations.
        """
        current = DefaultScope.get_current_instance()
        scope = current.scope_name if scope is None and current is not None else scope
        if scope is None:
            raise ConfigError("must be set to the name of a library, for example 'mmdet'", "scope")
        entries = iter_models(repo_or_mim_folder(scope))
        found = [name for entry in entries for name in _names(entry) if re.match(patterns, name)]
        print_log("".join(f"model_name: {name}\n" for name in found), "current")
        return found

    def _init_model(self, cfg: Any, weights: str | None, device: str = "cpu") -> Any:
        """Build the model, load its weights, move it to the device and switch it to evaluation mode."""
        checkpoint = None if weights is None else _load_checkpoint(weights, map_location="cpu")
        if not cfg:
            cfg.update(saved_config(checkpoint))
        if cfg.model.get("pretrained") is not None:
            del cfg.model.pretrained  # as in MMEngine, weights come only from the checkpoint
        model: Any = MODELS.build(cfg.model)
        model.cfg = cfg
        self._load_weights_to_model(model, checkpoint, cfg)
        model.to(device)
        model.eval()
        return model

    def _load_weights_to_model(self, model: nn.Module, checkpoint: Any, cfg: Any) -> None:
        """Load the weights; subclasses may also read the other entries of the checkpoint."""
        if checkpoint is not None:
            _load_checkpoint_to_model(model, checkpoint)
        else:
            warnings.warn(
                "the model's weights are randomly initialized, because no checkpoint was passed; pass weights=FILE",
                stacklevel=2,
            )

    def _init_collate(self, cfg: Any) -> Callable[[Any], Any]:
        """Return the collate function of the test data loader. The default is `pseudo_collate`."""
        loader = cfg.get("test_dataloader") or {}
        name = loader.get("collate_fn")
        if name is None:
            return pseudo_collate
        with FUNCTIONS.switch_scope_and_registry(self.scope) as registry:
            collate: Any = name if callable(name) else registry.resolve(_type(name))
        function: Callable[[Any], Any] = collate
        return function

    def _init_visualizer(self, cfg: Any) -> Visualizer | None:
        """Return a new visualizer, or None if the configuration does not contain one."""
        if "visualizer" not in cfg:
            return None
        stamp = str(time.time())
        name = cfg.visualizer.get("name", stamp)
        cfg.visualizer.name = f"{name}-{stamp}" if Visualizer.check_instance_created(name) else name
        visualizer: Visualizer = VISUALIZERS.build(cfg.visualizer)
        return visualizer

    def _get_chunk_data(self, inputs: Iterable[Any], chunk_size: int) -> Iterator[list[Any]]:
        """Yield lists of `chunk_size` inputs; the last list may be shorter."""
        rest = iter(inputs)
        while chunk := list(islice(rest, chunk_size)):
            yield chunk

    def _dispatch_kwargs(self, **kwargs: Any) -> tuple[dict[str, Any], ...]:
        """Return the arguments for each stage."""
        names = [getattr(self, f"{stage}_kwargs") for stage in _STAGES]
        unknown = set(kwargs).difference(*names)
        if unknown:
            raise ConfigError(
                f"{type(self).__name__} does not accept the arguments {sorted(unknown)}; valid arguments are "
                f"{sorted(set().union(*names))}"
            )
        return tuple({key: kwargs[key] for key in kwargs if key in stage} for stage in names)


def _with_progress(batches: Iterable[Any], count: int) -> Iterator[Any]:
    bar = ProgressBar(count)
    for batch in batches:
        yield batch
        bar.update()


def _names(entry: Mapping[str, Any]) -> list[str]:
    """Return the name of a model and its aliases."""
    aliases = entry.get("Alias") or []
    return [entry["Name"], *([aliases] if isinstance(aliases, str) else aliases)]


def _type(value: Any) -> str:
    return str(value["type"] if isinstance(value, Mapping) else value)
