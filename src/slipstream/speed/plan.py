"""`SpeedPlan`: the speed options of a run, read from `speed=`, MMEngine's keys and SuperGradients' keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

from slipstream.config import optional
from slipstream.dataset.loading.feed import read_prefetch
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.model import EmaOptions, read_ema
from slipstream.optim import GradClip
from slipstream.speed.activation_checkpointing import (
    ActivationCheckpointingOptions,
    read_activation_checkpointing,
)
from slipstream.speed.adaptive_clip import AdaptiveClipOptions
from slipstream.speed.auto import Capabilities, choose
from slipstream.speed.compile import CompileOptions, read_compile
from slipstream.speed.front_ends import Setting, UserHook, read_front_ends, settings
from slipstream.speed.gradient_centralization import GradientCentralizationOptions
from slipstream.speed.layer_decay import LayerDecayOptions, read_layer_decay
from slipstream.speed.nan_guard import NanGuardOptions, read_nan_guard
from slipstream.speed.parallel import ParallelOptions, read_parallel
from slipstream.speed.precision import PrecisionOptions, read_precision
from slipstream.speed.sam import SamOptions
from slipstream.speed.simple_options import (
    read_accumulate,
    read_bool,
    read_clip_grad,
    read_fused,
    read_gc,
    read_sync_bn,
)

__all__ = [
    "CFG_OPTIONS",
    "NO_EFFECT",
    "PARAMS_OPTIONS",
    "REFUSED",
    "Refusal",
    "SpeedPlan",
    "no_effect",
    "option_rows",
]


class _Option(NamedTuple):
    """How to read an option, and its config paths in addition to `speed=`."""

    read: Callable[[Any], Any]
    paths: tuple[str, ...] = ()


def _dict(options: type[Any], name: str) -> _Option:
    return _Option(partial(optional, options, path=name))


def _bool(name: str) -> Callable[[Any], bool]:
    return partial(read_bool, name=name)


def _read_ema(value: Any) -> EmaOptions | UserHook | None:
    return value if isinstance(value, UserHook) else read_ema(value)


@dataclass(frozen=True)
class SpeedPlan:
    """The speed options of a run, with one field per option. The modules in this package read and apply the options."""

    precision: Annotated[
        PrecisionOptions | None,
        _Option(read_precision, ("optim_wrapper.dtype", "training_params.mixed_precision")),
    ] = None
    compile: Annotated[
        CompileOptions | None, _Option(read_compile, ("cfg.compile", "training_params.torch_compile"))
    ] = None
    ema: Annotated[
        EmaOptions | UserHook | None, _Option(_read_ema, ("custom_hooks.EMAHook", "training_params.ema"))
    ] = None
    sync_bn: Annotated[bool, _Option(read_sync_bn, ("cfg.sync_bn", "training_params.sync_bn"))] = False
    parallel: Annotated[
        ParallelOptions | None,
        _Option(read_parallel, ("cfg.parallel", "cfg.model_wrapper_cfg", "training_params.multi_gpu")),
    ] = None
    find_unused_parameters: Annotated[
        bool, _Option(_bool("find_unused_parameters"), ("cfg.find_unused_parameters",))
    ] = False
    accumulate: Annotated[
        int,
        _Option(read_accumulate, ("optim_wrapper.accumulative_counts", "training_params.batch_accumulate")),
    ] = 1
    clip_grad: Annotated[
        GradClip | None,
        _Option(read_clip_grad, ("optim_wrapper.clip_grad", "training_params.clip_grad_norm")),
    ] = None
    gradient_centralization: Annotated[
        GradientCentralizationOptions | None,
        _dict(GradientCentralizationOptions, "gradient_centralization"),
    ] = None
    adaptive_clip: Annotated[AdaptiveClipOptions | None, _dict(AdaptiveClipOptions, "adaptive_clip")] = None
    layer_decay: Annotated[LayerDecayOptions | None, _Option(read_layer_decay)] = None
    sam: Annotated[SamOptions | None, _dict(SamOptions, "sam")] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointingOptions | None,
        _Option(read_activation_checkpointing, ("cfg.activation_checkpointing",)),
    ] = None
    channels_last: Annotated[bool, _Option(_bool("channels_last"))] = False
    fused: Annotated[bool | None, _Option(read_fused)] = False
    prefetch: Annotated[int, _Option(read_prefetch)] = 0
    cuda_graph: Annotated[bool, _Option(_bool("cuda_graph"))] = False
    nan_guard: Annotated[NanGuardOptions | None, _Option(read_nan_guard)] = None
    cudnn_benchmark: Annotated[bool, _Option(_bool("cudnn_benchmark"), ("env_cfg.cudnn_benchmark",))] = False
    expandable_segments: Annotated[bool, _Option(_bool("expandable_segments"))] = False
    gc: Annotated[int | None, _Option(read_gc)] = None
    auto: bool = False
    """Whether to enable the options that `slipstream.speed.auto.choose` selects."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each option that is set to its config path (`cfg.compile`, `speed.precision`) or to `auto: <reason>`."""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each option that `auto` leaves disabled to the reason."""

    @classmethod
    def read(
        cls,
        speed: Any = None,
        *,
        cfg: Mapping[str, Any] | None = None,
        optim_wrapper: Any = None,
        custom_hooks: Any = None,
        env_cfg: Mapping[str, Any] | None = None,
        training_params: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> SpeedPlan:
        """Read the options from all front ends. Call `complete` to add options that depend on the machine and model.

        Args:
            speed: `'auto'`, or a dict of options (the fields above), which may also contain `auto=True`.
            cfg, optim_wrapper, custom_hooks, env_cfg: the arguments of a Runner, with MMEngine's keys.
            training_params: a dict with SuperGradients' keys.
            device: device type; determines the dtype of mixed precision if none is specified.

        Raises:
            ConfigError: an option is unknown, has an invalid value, or is set to two different values.
        """
        front_ends = read_front_ends(
            speed,
            cfg or {},
            optim_wrapper,
            custom_hooks,
            env_cfg,
            {} if training_params is None else training_params,
            device,
        )
        autos = [_read_auto(front_ends[path], path) for path in ("speed", "training_params.speed")]
        first: dict[str, Setting] = {}
        values: dict[str, Any] = {}
        for setting in settings(_CONFIG_PATHS, front_ends):
            value, earlier = _read(setting), first.setdefault(setting.option, setting)
            if values.setdefault(setting.option, value) != value:
                raise ConfigError(
                    f"{setting.value!r} conflicts with {_user_path(earlier.path)}={earlier.value!r}; remove one of "
                    "them",
                    _user_path(setting.path),
                )
        sources = {option: setting.path for option, setting in first.items()}
        return cls(**values, auto=any(autos), sources=sources)

    def complete(self, capabilities: Capabilities) -> SpeedPlan:
        """Return the plan, with the choices of `auto` for options that are not set.

        Raises:
            ConfigError: the plan is invalid (see `REFUSED`).
        """
        values: dict[str, Any] = {}
        sources, notes = dict(self.sources), {}
        for choice in choose(capabilities) if self.auto else ():
            if choice.option in self.sources:
                continue
            if choice.enabled:
                values[choice.option] = choice.value
                sources[choice.option] = f"auto: {choice.reason}"
            else:
                notes[choice.option] = choice.reason
        plan = replace(self, **values, sources=sources, notes=notes)
        _check(plan, capabilities)
        return plan

    @staticmethod
    def options() -> list[str]:
        """Return the names of all options."""
        return list(_OPTIONS)

    def config_path(self, option: str) -> str:
        """Return the config path of an option for an error message."""
        return _user_path(self.sources.get(option, option))


_OTHER_NAMES = {
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip_grad",
    "max_grad_norm": "clip_grad",
    "mixed_precision": "precision",
    "torch_compile": "compile",
}
"""Maps names of options in Accelerate, Lightning and transformers to the names of Slipstream's options."""


def _read_auto(speed: Mapping[str, Any], path: str) -> bool:
    """Check the names of the options in `speed`, and return the value of `auto`."""
    known = [*_OPTIONS, "auto"]
    for key in speed:
        if key not in known:
            hint = f"; use '{own}'" if (own := _OTHER_NAMES.get(key)) else did_you_mean(str(key), known)
            raise UnknownNameError(f"no such option{hint}", f"{path}.{key}")
    return read_bool(speed.get("auto"), f"{path}.auto")


def _user_path(path: str) -> str:
    """Return a config path as written by the user: keys of `cfg` are at the top level of a configuration."""
    return path.removeprefix("cfg.")


def _read(setting: Setting) -> Any:
    """Return the typed value of a setting; errors name its config path."""
    try:
        return _OPTIONS[setting.option].read(setting.value)
    except ConfigError as error:
        error.path = _user_path(setting.path) + error.path.removeprefix(setting.option)
        raise


_OPTIONS: Mapping[str, _Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SpeedPlan, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_CONFIG_PATHS: Mapping[str, list[str]] = {
    name: [f"speed.{name}", *option.paths, f"training_params.speed.{name}"]
    for name, option in _OPTIONS.items()
}


def _keys(front_end: str) -> list[str]:
    """Return the keys of a front end that set options."""
    paths = (path.rpartition(".") for option_paths in _CONFIG_PATHS.values() for path in option_paths)
    return [key for prefix, _, key in paths if prefix == front_end]


CFG_OPTIONS = (*_keys("cfg"), "training_params")
"""The keys of options that a Runner reads only from its `cfg`."""
_MORE_PARAMS = ("speed", "torch_compile_loss", "torch_compile_options", "torch_compile_mode", "ema_params")
PARAMS_OPTIONS = (*_keys("training_params"), *_MORE_PARAMS)
"""The keys of SuperGradients' `training_params` that set speed options."""


# ---- invalid combinations, and options without effect ---------------------------------------------------


class Refusal(NamedTuple):
    """A condition under which a plan is invalid."""

    option: str
    """The option whose config path is included in the error message."""
    when: Callable[[SpeedPlan, Capabilities], bool]
    message: str
    """The error message, which describes what is wrong and how to fix it."""


def _has_precision(plan: SpeedPlan, precision: str) -> bool:
    return plan.precision is not None and plan.precision.name == precision


def _compiles_step(plan: SpeedPlan) -> bool:
    return plan.compile is not None and plan.compile.scope in (None, "step")


REFUSED = (
    Refusal("precision", lambda plan, capabilities: _has_precision(plan, "fp8") and capabilities.capability < (8, 9),
            "'fp8' requires an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper); use 'bf16'"),
    Refusal("precision", lambda plan, capabilities: _has_precision(plan, "fp8") and not capabilities.torchao,
            "'fp8' requires torchao; run: pip install 'slipstream[fp8]'"),
    Refusal("cuda_graph", lambda plan, capabilities: plan.cuda_graph and capabilities.device != "cuda",
            "requires an NVIDIA or AMD GPU; none found. Remove this option"),
    Refusal("cuda_graph", lambda plan, capabilities: plan.cuda_graph and not _compiles_step(plan),
            "requires a step that is compiled as one graph; add compile=dict(scope='step')"),
    Refusal("compile", lambda plan, capabilities: (
                plan.compile is not None and plan.compile.scope == "step"
                and plan.parallel is not None and plan.parallel.kind != "ddp"),
            "scope='step' does not support sharded models or custom wrappers; use scope='model' or parallel='ddp'"),
    Refusal("compile", lambda plan, capabilities: (
                plan.compile is not None and plan.compile.backend == "eager"
                and plan.activation_checkpointing is not None),
            "backend 'eager' does not support activation_checkpointing; use 'aot_eager' or 'inductor'"),
    Refusal("find_unused_parameters", lambda plan, capabilities: (
                plan.find_unused_parameters and plan.parallel is not None and plan.parallel.sharded),
            "applies only to DDP; remove it or use parallel='ddp'"),
)  # fmt: skip
"""The conditions under which `_check` raises an error."""

NO_EFFECT = (
    ("precision", lambda plan, capabilities: _has_precision(plan, "tf32") and not capabilities.tf32,
     "'tf32' requires an NVIDIA GPU of compute capability 8.0 or higher (Ampere); the step computes in float32"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.device != "cuda",
     "this device does not use cuDNN"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.deterministic,
     "randomness.deterministic disables the benchmark"),
    ("expandable_segments", lambda plan, capabilities: plan.expandable_segments and capabilities.device != "cuda",
     "this option affects only GPU memory"),
    ("prefetch", lambda plan, capabilities: bool(plan.prefetch) and capabilities.device == "cpu",
     "batches are already in CPU memory"),
    ("activation_checkpointing", lambda plan, capabilities: (
        plan.activation_checkpointing is not None and plan.activation_checkpointing.offload
        and plan.compile is not None),
     "compiled code does not support offload; block inputs stay on the device, and the rest is recomputed"),
    ("sync_bn", lambda plan, capabilities: plan.sync_bn and capabilities.world_size == 1,
     "a single process already normalizes over the whole batch"),
    ("parallel", lambda plan, capabilities: plan.parallel is not None and capabilities.world_size == 1,
     "only one process is running; start several with --nproc or a launcher"),
)  # fmt: skip
"""Tuples (option, condition, reason): if the condition holds, the option has no effect. This is not an error, so that
the same configuration works on a laptop and on a cluster."""


def _check(plan: SpeedPlan, capabilities: Capabilities) -> None:
    """Check that a plan is valid.

    Raises:
        ConfigError: an entry of `REFUSED` applies.
    """
    for refusal in REFUSED:
        if refusal.when(plan, capabilities):
            raise ConfigError(refusal.message, plan.config_path(refusal.option))


def no_effect(plan: SpeedPlan, capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    """Yield the name of each option that has no effect on this machine, and the reason."""
    for option, when, why in NO_EFFECT:
        if when(plan, capabilities):
            yield option, why


# ---- description ----------------------------------------------------------------------------------------


def option_rows(plan: SpeedPlan, capabilities: Capabilities) -> Iterator[tuple[str, str, str, str]]:
    """Yield the option, value, source and reason for each option that is set, or that `auto` leaves disabled."""
    without_effect = {option: f"no effect here: {why}" for option, why in no_effect(plan, capabilities)}
    for option in plan.options():
        if option in plan.notes:
            yield option, "off", "auto", plan.notes[option]
        elif option in plan.sources:
            source, _, why = plan.sources[option].partition(": ")
            value = getattr(plan, option)
            off = value is None and option != "fused"
            yield option, "off" if off else _describe(value), source, without_effect.get(option, why)


def _describe(value: Any) -> str:
    """Return an option's value as a short string; for a dataclass, only required fields and non-default values."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "where supported"
    if not is_dataclass(value):
        return str(value)
    texts = []
    for f in fields(value):
        current, default = getattr(value, f.name), _default(f)
        if isinstance(current, Mapping):
            texts += [f"{key}={item}" for key, item in current.items() if key != "type"]
        elif current != default:
            texts.append(str(current) if default is MISSING else f"{f.name}={current}")
    return ", ".join(texts) or "on"


def _default(field: Any) -> Any:
    """Return the default value of a field, or MISSING if the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()
