"""`SpeedPlan`: the speed options of a run, read from `speed=`, MMEngine's keys and SuperGradients' keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, NamedTuple, get_type_hints

from slipstream.config import read_value
from slipstream.dataset.loading.feed import read_prefetch
from slipstream.errors import ConfigError
from slipstream.model import EmaOptions
from slipstream.optim import GradClip
from slipstream.speed.activation_checkpointing import ActivationCheckpointingOptions
from slipstream.speed.adaptive_clip import AdaptiveClipOptions
from slipstream.speed.auto import Capabilities, choose
from slipstream.speed.compile import CompileOptions
from slipstream.speed.front_ends import Setting, UserHook, read_settings
from slipstream.speed.gradient_centralization import GradientCentralizationOptions
from slipstream.speed.layer_decay import LayerDecayOptions
from slipstream.speed.nan_guard import NanGuardOptions
from slipstream.speed.parallel import ParallelOptions, read_parallel
from slipstream.speed.precision import PrecisionOptions, read_precision
from slipstream.speed.sam import SamOptions
from slipstream.typecheck import PositiveInt, check

__all__ = ["NO_EFFECT", "REFUSED", "Refusal", "SpeedPlan", "no_effect", "option_rows"]


def _read_clip_grad(value: Any) -> GradClip | None:
    if isinstance(value, GradClip) or not value:
        return value or None
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a dict such as dict(max_norm=35), not {value!r}", "clip_grad")
    return GradClip.from_dict(value)


def _read_sync_bn(value: Any) -> bool:
    return bool(check(value == "torch" or value, bool, "sync_bn"))  # MMEngine's 'torch' is the same as True


@dataclass(frozen=True)
class SpeedPlan:
    """The speed options of a run, with one field per option. The modules in this package read and apply the options."""

    precision: Annotated[PrecisionOptions | None, read_precision] = None
    compile: CompileOptions | None = None
    ema: EmaOptions | UserHook | None = None
    sync_bn: Annotated[bool, _read_sync_bn] = False
    parallel: Annotated[ParallelOptions | None, read_parallel] = None
    find_unused_parameters: bool = False
    accumulate: PositiveInt = 1
    clip_grad: Annotated[GradClip | None, _read_clip_grad] = None
    gradient_centralization: GradientCentralizationOptions | None = None
    adaptive_clip: AdaptiveClipOptions | None = None
    layer_decay: LayerDecayOptions | None = None
    sam: SamOptions | None = None
    activation_checkpointing: ActivationCheckpointingOptions | None = None
    channels_last: bool = False
    fused: bool | None = False
    """True (required), None (if supported) or False (the optimizer does not change)."""
    prefetch: Annotated[int, read_prefetch] = 0
    cuda_graph: bool = False
    nan_guard: NanGuardOptions | None = None
    cudnn_benchmark: bool = False
    expandable_segments: bool = False
    gc: PositiveInt | None = None
    """Number of steps between garbage collections; None keeps automatic collection."""
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
        options = [*cls.options(), "auto"]
        first: dict[str, Setting] = {}
        values: dict[str, Any] = {}
        for setting in read_settings(
            options, speed, cfg, optim_wrapper, custom_hooks, env_cfg, training_params, device
        ):
            option, value = setting.option, _read(setting)
            earlier = first.setdefault(option, setting)
            if values.setdefault(option, value) != value and option != "auto":
                raise ConfigError(
                    f"{setting.value!r} conflicts with {_user_path(earlier.path)}={earlier.value!r}; remove one of "
                    "them",
                    _user_path(setting.path),
                )
            values[option] = values[option] or value
        sources = {option: setting.path for option, setting in first.items() if option != "auto"}
        return cls(**values, sources=sources)

    def complete(self, capabilities: Capabilities) -> SpeedPlan:
        """Return the plan, with the choices of `auto` for options that are not set.

        Raises:
            ConfigError: the plan is invalid (see `REFUSED`).
        """
        choices = [c for c in choose(capabilities) if c.option not in self.sources] if self.auto else []
        enabled = {choice.option: choice for choice in choices if choice.enabled}
        plan = replace(
            self,
            **{option: choice.value for option, choice in enabled.items()},
            sources={
                **self.sources,
                **{option: f"auto: {choice.reason}" for option, choice in enabled.items()},
            },
            notes={choice.option: choice.reason for choice in choices if not choice.enabled},
        )
        for refusal in REFUSED:
            if refusal.when(plan, capabilities):
                raise ConfigError(refusal.message, plan.config_path(refusal.option))
        return plan

    @staticmethod
    def options() -> list[str]:
        """Return the names of all options."""
        return [f.name for f in fields(SpeedPlan) if f.name not in ("auto", "sources", "notes")]

    def config_path(self, option: str) -> str:
        """Return the config path of an option for an error message."""
        return _user_path(self.sources.get(option, option))


def _user_path(path: str) -> str:
    """Return a config path as written by the user: keys of `cfg` are at the top level of a configuration."""
    return path.removeprefix("cfg.")


def _read(setting: Setting) -> Any:
    """Return the typed value of a setting; errors name its config path."""
    option, value = setting.option, setting.value
    if getattr(SpeedPlan, option) is None and (value is False or value == []):
        return None
    try:
        return read_value(get_type_hints(SpeedPlan, include_extras=True)[option], value, option)
    except ConfigError as error:
        error.path = _user_path(setting.path) + error.path.removeprefix(option)
        raise


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
