"""Names of `super_gradients` whose signatures differ from Slipstream's: `Trainer`, `models.get`, enums, decorators."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from slipstream import registry
from slipstream.devices import device_type
from slipstream.dist import infer_launcher, master_only
from slipstream.errors import ConfigError
from slipstream.recipes.compose import compose
from slipstream.recipes.find import FOLDER
from slipstream.training.dataloaders import read_group
from slipstream.training.params import TrainingParams
from slipstream.training.trainer import KDTrainer as SlipstreamKDTrainer
from slipstream.training.trainer import Trainer as SlipstreamTrainer
from slipstream.zoo import models

T = TypeVar("T", bound=Callable[..., Any])

# The version of SuperGradients whose interface this package implements.
SUPPORTED_VERSION = "3.7.1"
# SuperGradients' default: tensors are matched by order if the names differ.
_DEFAULT_STRICT_LOAD = "no_key_matching"

# ---- setup ------------------------------------------------------------------------------------------------

multi_process_safe = master_only


def init_trainer() -> None:
    """Do nothing, because the Runner sets up the process."""


def is_distributed() -> bool:
    """Return whether this process was started by a launcher."""
    return infer_launcher() != "none"


def get_logger(logger_name: str = "slipstream", log_level: Any = None) -> logging.Logger:
    """Return a logger from Python's `logging`."""
    logger = logging.getLogger(logger_name)
    if log_level is not None:
        logger.setLevel(log_level)
    return logger


def setup_device(multi_gpu: Any = None, num_gpus: int | None = None, device: str | None = "cuda") -> None:
    """Check that the process runs on the requested devices.

    The devices are determined by the machine and the launcher, not by this function.

    Args:
        multi_gpu: a `MultiGPUMode`, its name, or a device, as in `setup_device('cpu')`.
        num_gpus: number of devices; -1 for all, 0 for the CPU.
        device: 'cuda' for the machine's accelerator, if available, or 'cpu'.

    Raises:
        ConfigError: the script must be started differently; the message explains how.
    """
    if multi_gpu in ("cpu", "cuda"):  # SuperGradients' documentation passes the device as the first argument
        multi_gpu, device = None, multi_gpu
    kind, available = device_type(), torch.accelerator.device_count()
    if kind != "cpu" and (device == "cpu" or num_gpus == 0):
        raise ConfigError(f"to train on the CPU, hide the {kind} devices (CUDA_VISIBLE_DEVICES=)", "device")
    is_parallel = str(getattr(multi_gpu, "value", multi_gpu)).upper() in ("DDP", "DP", "AUTO")
    requested = num_gpus if num_gpus is not None else -1 if is_parallel else 1
    count = available if requested == -1 else min(requested, available)
    if count > 1 and not is_distributed():
        command = f"torchrun --nproc-per-node {count} -m slipstream.supergradients SCRIPT.py"
        raise ConfigError(f"to train on {count} devices, start the script with {command}", "multi_gpu")


# ---- trainers ---------------------------------------------------------------------------------------------


class Trainer(SlipstreamTrainer):
    """`slipstream.Trainer` with SuperGradients' constructor arguments and method names.

    Args:
        experiment_name: name of the run and of its folder.
        device, multi_gpu: see `setup_device`.
        ckpt_root_dir: parent folder of the run's folder. Default: `work_dirs`.
    """

    def __init__(
        self,
        experiment_name: str,
        device: str | None = None,
        multi_gpu: Any = None,
        ckpt_root_dir: str | Path | None = None,
    ) -> None:
        if device is not None or multi_gpu is not None:
            setup_device(multi_gpu, device=device)
        super().__init__(experiment_name, ckpt_root_dir)

    @classmethod
    def evaluate_from_config(cls, cfg: Any) -> tuple[nn.Module, dict[str, float]]:
        """Validate the network of a composed recipe; see `evaluate_from_recipe`."""
        return cls.evaluate_from_recipe(cfg)


class KDTrainer(Trainer, SlipstreamKDTrainer):
    """`slipstream.training.KDTrainer` with SuperGradients' constructor arguments and method names."""


def get_params(config_name: str, overriding_params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `training_params` from a recipe, or from a file in the `training_hyperparams` config group.

    Keys that the recipe does not set have their default values.

    Args:
        config_name: name of the recipe, such as `cifar10_resnet`, or of the file, such as
            `cifar10_resnet_train_params`; the name may be prefixed with the group.
        overriding_params: values that replace those of the recipe; None values have no effect.

    Raises:
        UnknownNameError: there is no such recipe or file.
    """
    group = "training_hyperparams"
    name = Path(config_name.removesuffix(".yaml")).name
    is_file = (FOLDER / group / f"{name}.yaml").is_file()
    values = read_group(group, name) if is_file else compose(name)[group]
    overrides = {key: value for key, value in (overriding_params or {}).items() if value is not None}
    return {**vars(TrainingParams()), **values, **overrides}


def load_recipe(
    config_name: str, recipes_dir_path: str | Path | None = None, overrides: Sequence[str] | None = None
) -> Any:
    """Compose a recipe for `Trainer.train_from_config`, and return an OmegaConf container; see `compose`."""
    from omegaconf import OmegaConf

    return OmegaConf.create(compose(config_name, overrides or (), recipes_dir_path))


# ---- networks ---------------------------------------------------------------------------------------------


def get_model(
    model_name: str,
    arch_params: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    strict_load: Any = _DEFAULT_STRICT_LOAD,
    checkpoint_path: str | Path | None = None,
    pretrained_weights: str | None = None,
    load_backbone: bool = False,
    download_required_code: bool = True,
    checkpoint_num_classes: int | None = None,
    num_input_channels: int | None = None,
    checkpoint_sha256: str | None = None,
) -> nn.Module:
    """Return one of Slipstream's networks, or an instance of a class registered with `register_model`.

    Args:
        model_name: name of the network.
        arch_params: arguments of the network.
        num_classes: number of classes.
        strict_load, checkpoint_path, load_backbone, checkpoint_num_classes: see `slipstream.zoo.models.get`.
        pretrained_weights: must be None, except for timm networks; see `slipstream.zoo.models.get`.
        download_required_code: has no effect, because nothing is downloaded.
        num_input_channels: number of image channels. Default: the network's own default, usually 3.
        checkpoint_sha256: the SHA-256 checksum of the checkpoint; SuperGradients does not have this argument.

    Raises:
        UnknownNameError: the network does not exist.
        ConfigError: `load_backbone` is set without a checkpoint. For other errors, see
            `slipstream.zoo.models.get`.
    """
    if load_backbone and not checkpoint_path:
        raise ConfigError("requires checkpoint_path", "load_backbone")
    options = dict(arch_params or {})
    if num_input_channels not in (None, 3):
        options["in_channels"] = num_input_channels
    weights: dict[str, Any] = {
        "strict_load": strict_load,
        "load_backbone": load_backbone,
        "checkpoint_sha256": checkpoint_sha256,
    }
    if model_name in models.names() or model_name not in registry.MODELS:
        weights |= {"checkpoint_path": checkpoint_path, "checkpoint_num_classes": checkpoint_num_classes}
        weights["pretrained_weights"] = pretrained_weights
        return models.get(model_name, num_classes, arch_params=options, **weights)
    known = inspect.signature(registry.MODELS.resolve(model_name)).parameters
    if num_classes is not None and "num_classes" in known:
        options["num_classes"] = num_classes
    arguments = {"arch_params": options} if "arch_params" in known else options
    network: nn.Module = registry.MODELS.build({"type": model_name, **arguments})
    if checkpoint_path is not None:
        models.load(network, checkpoint_path, **weights)
    return network


def load_checkpoint_to_model(
    net: nn.Module,
    ckpt_local_path: str | Path,
    load_backbone: bool = False,
    strict: Any = _DEFAULT_STRICT_LOAD,
    load_weights_only: bool = True,
    load_ema_as_net: bool = False,
    load_processing_params: bool = False,
) -> None:
    """Load weights from a file into a network; see `slipstream.zoo.models.load`.

    The last three arguments have no effect: only weights are loaded, and the EMA weights are used if the file contains
    them.
    """
    models.load(net, ckpt_local_path, strict, load_backbone)


# Network names for `models.get`: `Models.DDRNET_23` is `'ddrnet_23'`.
Models = SimpleNamespace(**{network.upper(): network for network in models.names()})


class Losses:
    """Loss names for `training_params['loss']`."""

    BCE_DICE_LOSS = "BCEDiceLoss"
    CROSS_ENTROPY = "CrossEntropyLoss"
    DICE_CE_EDGE_LOSS = "DiceCEEdgeLoss"
    KD_LOSS = "KDLogitsLoss"
    MSE = "MSE"
    SHELFNET_OHEM_LOSS = "ShelfNetOHEMLoss"
    STDC_LOSS = "STDCLoss"


class StrictLoad(Enum):
    """How strictly the tensor names in a checkpoint must match those of the network."""

    OFF = False
    ON = True
    NO_KEY_MATCHING = "no_key_matching"
    KEY_MATCHING = "key_matching"


class MultiGPUMode(StrEnum):
    """How a script uses multiple devices."""

    OFF = "Off"
    DATA_PARALLEL = "DP"
    DISTRIBUTED_DATA_PARALLEL = "DDP"
    AUTO = "AUTO"


# ---- decorators -------------------------------------------------------------------------------------------


def _register_in(target: registry.Registry) -> Callable[..., Callable[[T], T]]:
    def register(name: str | None = None, deprecated_name: str | None = None) -> Callable[[T], T]:
        """Return a decorator that registers a class or a function under `name` (default: its own name).

        Raises:
            UnknownNameError: if another class or function is registered under one of the names.
        """

        def decorate(kind: T) -> T:
            names = [name or kind.__name__, *([deprecated_name] if deprecated_name else [])]
            target.register_module(name=names, module=kind)
            return kind

        return decorate

    return register


register_callback = _register_in(registry.HOOKS)
register_collate_function = _register_in(registry.FUNCTIONS)
register_dataset = _register_in(registry.DATASETS)
register_loss = register_model = _register_in(registry.MODELS)
register_lr_scheduler = _register_in(registry.PARAM_SCHEDULERS)
register_metric = _register_in(registry.METRICS)
register_optimizer = _register_in(registry.OPTIMIZERS)
register_sampler = _register_in(registry.DATA_SAMPLERS)
register_transform = _register_in(registry.TRANSFORMS)
