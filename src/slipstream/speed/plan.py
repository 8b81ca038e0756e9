"""`SpeedPlan`: the speed options of a run, read from `speed=`, MMEngine's keys and SuperGradients' keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from slipstream.speed.front_ends import UserHook, read_settings
from slipstream.speed.gradient_centralization import GradientCentralizationOptions
from slipstream.speed.layer_decay import LayerDecayOptions
from slipstream.speed.nan_guard import NanGuardOptions
from slipstream.speed.parallel import ParallelOptions, read_parallel
from slipstream.speed.precision import Precision, read_precision
from slipstream.speed.sam import SamOptions
from slipstream.typecheck import PositiveInt

__all__ = ["SpeedPlan", "option_rows", "rules"]


@dataclass(frozen=True)
class SpeedPlan:
    """The speed options of a run, with one field per option. The modules in this package read and apply the options."""

    precision: Annotated[Precision | None, read_precision] = None
    compile: CompileOptions | None = None
    ema: EmaOptions | UserHook | None = None
    sync_bn: bool = False
    parallel: Annotated[ParallelOptions | None, read_parallel] = None
    find_unused_parameters: bool = False
    accumulate: PositiveInt = 1
    clip_grad: GradClip | None = None
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
    """Maps each option that is set to its config path (`compile`, `speed.precision`) or to `auto: <reason>`."""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each option that `auto` leaves disabled to the reason."""
    no_effect: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each option that has no effect on this machine to the reason; set by `complete`."""

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
        hints = get_type_hints(cls, include_extras=True)
        found: dict[str, tuple[str, Any, Any]] = {}  # the path, the setting and its value
        names = [*cls.options(), "auto"]
        settings = read_settings(
            names, speed, cfg, optim_wrapper, custom_hooks, env_cfg, training_params, device
        )
        for option, path, setting in settings:
            try:
                is_off = getattr(cls, option) is None and (setting is False or setting == [])
                value = None if is_off else read_value(hints[option], setting, option)
            except ConfigError as error:
                error.path = path + error.path.removeprefix(option)
                raise
            first, earlier, known = found.get(option, (path, setting, value))
            if known != value and option != "auto":
                message = f"{setting!r} conflicts with {first}={earlier!r}; remove one of them"
                raise ConfigError(message, path)
            found[option] = first, earlier, known or value
        sources = {option: found[option][0] for option in cls.options() if option in found}
        return cls(**{option: value for option, (_, _, value) in found.items()}, sources=sources)

    def complete(self, capabilities: Capabilities) -> SpeedPlan:
        """Return the plan for a machine and a model, with the choices of `auto` for options that are not set.

        Raises:
            ConfigError: the plan is invalid (see `rules`).
        """
        choices = [c for c in choose(capabilities) if c.option not in self.sources] if self.auto else []
        enabled = {choice.option: choice for choice in choices if choice.enabled}
        plan = replace(
            self,
            **{option: choice.value for option, choice in enabled.items()},
            sources={**self.sources, **{name: f"auto: {choice.reason}" for name, choice in enabled.items()}},
            notes={choice.option: choice.reason for choice in choices if not choice.enabled},
        )
        refused, without_effect = rules(plan, capabilities)
        for rule in refused:
            if rule.applies:
                raise ConfigError(rule.message, plan.config_path(rule.option))
        no_effect = {rule.option: rule.message for rule in reversed(without_effect) if rule.applies}
        return replace(plan, no_effect=no_effect)

    @staticmethod
    def options() -> list[str]:
        """Return the names of all options."""
        return [f.name for f in fields(SpeedPlan) if f.compare and f.name != "auto"]

    def config_path(self, option: str) -> str:
        """Return the config path of an option for an error message."""
        return self.sources.get(option, option)

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Replace the option at the start of the path of each `ConfigError` with the option's config path."""
        try:
            yield
        except ConfigError as error:
            option, dot, rest = error.path.partition(".")
            error.path = self.config_path(option) + dot + rest
            raise


class Rule(NamedTuple):
    """A rule by which an option is refused, or has no effect."""

    option: str
    """The option whose config path is part of the error message."""
    applies: bool
    message: str


def rules(plan: SpeedPlan, capabilities: Capabilities) -> tuple[list[Rule], list[Rule]]:
    """Return the rules by which an option of the plan raises an error, and those by which an option has no effect.

    The message of an error describes what is wrong and how to fix it. No effect is not an error, so that the same
    configuration works on a laptop and on a cluster.
    """
    scope = (plan.compile.scope or "step") if plan.compile else None
    device, parallel, checkpointing = capabilities.device, plan.parallel, plan.activation_checkpointing
    refused = [
        Rule("precision", plan.precision == "fp8" and capabilities.capability < (8, 9),
             "'fp8' requires an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper); use 'bf16'"),
        Rule("precision", plan.precision == "fp8" and not capabilities.torchao,
             "'fp8' requires torchao; run: pip install 'slipstream[fp8]'"),
        Rule("cuda_graph", plan.cuda_graph and device != "cuda",
             "requires an NVIDIA or AMD GPU; none found. Remove this option"),
        Rule("cuda_graph", plan.cuda_graph and scope != "step",
             "requires a step that is compiled as one graph; add compile=dict(scope='step')"),
        Rule("compile", (plan.compile is not None and plan.compile.scope == "step"
                         and parallel is not None and parallel.kind != "ddp"),
             "scope='step' does not support sharded models or custom wrappers; use scope='model' or parallel='ddp'"),
        Rule("compile", plan.compile is not None and plan.compile.backend == "eager" and checkpointing is not None,
             "backend 'eager' does not support activation_checkpointing; use 'aot_eager' or 'inductor'"),
        Rule("find_unused_parameters", plan.find_unused_parameters and parallel is not None and parallel.sharded,
             "applies only to DDP; remove it or use parallel='ddp'"),
    ]  # fmt: skip
    without_effect = [
        Rule("precision", plan.precision == "tf32" and not capabilities.tf32,
             "'tf32' requires an NVIDIA GPU of compute capability 8.0 or higher (Ampere); "
             "the step computes in float32"),
        Rule("cudnn_benchmark", plan.cudnn_benchmark and device != "cuda", "this device does not use cuDNN"),
        Rule("cudnn_benchmark", plan.cudnn_benchmark and capabilities.deterministic,
             "randomness.deterministic disables the benchmark"),
        Rule("expandable_segments", plan.expandable_segments and device != "cuda",
             "this option affects only GPU memory"),
        Rule("prefetch", bool(plan.prefetch) and device == "cpu", "batches are already in CPU memory"),
        Rule("activation_checkpointing", checkpointing is not None and checkpointing.offload and scope is not None,
             "compiled code does not support offload; block inputs stay on the device, and the rest is recomputed"),
        Rule("sync_bn", plan.sync_bn and capabilities.world_size == 1,
             "a single process already normalizes over the whole batch"),
        Rule("parallel", parallel is not None and capabilities.world_size == 1,
             "only one process is running; start several with --nproc or a launcher"),
    ]  # fmt: skip
    return refused, without_effect


def option_rows(plan: SpeedPlan) -> Iterator[tuple[str, str, str, str]]:
    """Yield the option, value, source and reason for each option that is set, or that `auto` leaves disabled."""
    for option in plan.options():
        if option in plan.notes:
            yield option, "off", "auto", plan.notes[option]
        elif option in plan.sources:
            source, _, why = plan.sources[option].partition(": ")
            if option in plan.no_effect:
                why = f"no effect here: {plan.no_effect[option]}"
            value = getattr(plan, option)
            off = value is None and option != "fused"
            yield option, "off" if off else _describe(value), source, why


def _describe(value: Any) -> str:
    """Return an option's value as a short string; for a dataclass, only required fields and non-default values."""
    if value is None or isinstance(value, bool):
        return "where supported" if value is None else "on" if value else "off"
    if not is_dataclass(value):
        return str(value)
    texts = []
    for f in fields(value):
        current = getattr(value, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if isinstance(current, Mapping):
            texts += [f"{key}={item}" for key, item in current.items() if key != "type"]
        elif current != default:
            texts.append(str(current) if default is MISSING else f"{f.name}={current}")
    return ", ".join(texts) or "on"
