"""Which options a run uses: read from three vocabularies into one typed plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, get_type_hints

from slipstream.dataset.loading.feed import read_prefetch
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim import GradClip
from slipstream.speed.activation_checkpointing import (
    ActivationCheckpointingOptions,
    read_activation_checkpointing,
)
from slipstream.speed.adaptive_clip import AdaptiveClipOptions, read_adaptive_clip
from slipstream.speed.auto import choose
from slipstream.speed.capabilities import Capabilities
from slipstream.speed.compile import CompileOptions, read_compile
from slipstream.speed.ema import EmaOptions, read_ema
from slipstream.speed.front_ends import Setting, UserHook, read_front_ends, settings
from slipstream.speed.fused import read_fused
from slipstream.speed.gradient_centralization import (
    GradientCentralizationOptions,
    read_gradient_centralization,
)
from slipstream.speed.layer_decay import LayerDecayOptions, read_layer_decay
from slipstream.speed.nan_guard import NanGuardOptions, read_nan_guard
from slipstream.speed.parallel import ParallelOptions, read_parallel
from slipstream.speed.precision import PrecisionOptions, read_precision
from slipstream.speed.process import read_gc, read_switch
from slipstream.speed.refused import check
from slipstream.speed.sam import SamOptions, read_sam
from slipstream.speed.simple_options import read_accumulate, read_clip_grad, read_sync_bn

__all__ = ["CFG_OPTIONS", "PARAMS_OPTIONS", "SpeedPlan"]

CFG_OPTIONS = (
    "compile",
    "sync_bn",
    "parallel",
    "model_wrapper_cfg",
    "find_unused_parameters",
    "activation_checkpointing",
    "training_params",
)
"""The keys that a Runner reads from its `cfg` alone."""

PARAMS_OPTIONS = (
    "speed",
    "mixed_precision",
    "torch_compile",
    "torch_compile_loss",
    "torch_compile_options",
    "torch_compile_mode",
    "ema",
    "ema_params",
    "sync_bn",
    "multi_gpu",
    "batch_accumulate",
    "clip_grad_norm",
)
"""The keys of SuperGradients' `training_params` that say something about options."""


@dataclass(frozen=True)
class _Option:
    """How an option is read, and where else than in `speed=` it may stand."""

    read: Callable[[Any], Any]
    places: tuple[str, ...] = ()


def _switch(name: str) -> Callable[[Any], bool]:
    return partial(read_switch, name=name)


def _read_ema(value: Any) -> EmaOptions | UserHook | None:
    return value if isinstance(value, UserHook) else read_ema(value)


@dataclass(frozen=True)
class SpeedPlan:
    """The options of a run. An option is a line here, and a file that reads its options and applies them."""

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
        bool, _Option(_switch("find_unused_parameters"), ("cfg.find_unused_parameters",))
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
        GradientCentralizationOptions | None, _Option(read_gradient_centralization)
    ] = None
    adaptive_clip: Annotated[AdaptiveClipOptions | None, _Option(read_adaptive_clip)] = None
    layer_decay: Annotated[LayerDecayOptions | None, _Option(read_layer_decay)] = None
    sam: Annotated[SamOptions | None, _Option(read_sam)] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointingOptions | None,
        _Option(read_activation_checkpointing, ("cfg.activation_checkpointing",)),
    ] = None
    channels_last: Annotated[bool, _Option(_switch("channels_last"))] = False
    fused: Annotated[bool | None, _Option(read_fused)] = False
    prefetch: Annotated[int, _Option(read_prefetch)] = 0
    cuda_graph: Annotated[bool, _Option(_switch("cuda_graph"))] = False
    nan_guard: Annotated[NanGuardOptions | None, _Option(read_nan_guard)] = None
    cudnn_benchmark: Annotated[bool, _Option(_switch("cudnn_benchmark"), ("env_cfg.cudnn_benchmark",))] = (
        False
    )
    expandable_segments: Annotated[bool, _Option(_switch("expandable_segments"))] = False
    gc: Annotated[int | None, _Option(read_gc)] = None
    auto: bool = False
    """Whether to switch on what `choose` knows to pay."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each option that was set was set: `cfg.compile`, `speed.precision`, `auto: why`."""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Why `auto` left an option off."""

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
        """Read what all front ends say; `complete` then adds what depends on the machine and the model.

        Args:
            speed: `'auto'`, or a dict of the fields above, of which `auto=True` is one.
            cfg, optim_wrapper, custom_hooks, env_cfg: those of a Runner, in MMEngine's words.
            training_params: in SuperGradients' words.
            device: kind of device; it settles what a lower precision without a name is.

        Raises:
            ConfigError: an option is unknown, has a wrong value, or two front ends say different things.
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
        asked = {_asks_for_auto(front_ends[place], place) for place in ("speed", "training_params.speed")}
        first: dict[str, Setting] = {}
        values: dict[str, Any] = {}
        for setting in settings(_PLACES, front_ends):
            value, earlier = _read(setting), first.setdefault(setting.option, setting)
            if values.setdefault(setting.option, value) != value:
                raise ConfigError(
                    f"{setting.value!r} contradicts {_shown(earlier.place)}={earlier.value!r}: give it in one place",
                    _shown(setting.place),
                )
        sources = {option: setting.place for option, setting in first.items()}
        return cls(**values, auto=True in asked, sources=sources)

    def complete(self, capabilities: Capabilities) -> SpeedPlan:
        """Return the plan with what `auto` chooses where nobody has said anything.

        Raises:
            ConfigError: the plan cannot work (`slipstream.speed.refused`).
        """
        values: dict[str, Any] = {}
        sources, notes = dict(self.sources), {}
        for choice in choose(capabilities) if self.auto else ():
            if choice.option in self.sources:
                continue
            if choice.on:
                values[choice.option] = choice.value
                sources[choice.option] = f"auto: {choice.why}"
            else:
                notes[choice.option] = choice.why
        plan = replace(self, **values, sources=sources, notes=notes)
        check(plan, capabilities)
        return plan

    @staticmethod
    def options() -> list[str]:
        """Return the names of all options."""
        return list(_OPTIONS)

    def place(self, option: str) -> str:
        """Return where the option was set, as an error names it."""
        return _shown(self.sources.get(option, option))


def _asks_for_auto(words: Mapping[str, Any], place: str) -> bool:
    """Check the names of the options in our own words, and return what they say about `auto`."""
    known = [*_OPTIONS, "auto"]
    for word in words:
        if word not in known:
            raise UnknownNameError(f"no such option{did_you_mean(str(word), known)}", f"{place}.{word}")
    return read_switch(words.get("auto"), f"{place}.auto")


def _shown(place: str) -> str:
    """Return a place as it is written: what a Runner finds in `cfg` stands at the top of a configuration."""
    return place.removeprefix("cfg.")


def _read(setting: Setting) -> Any:
    """Return the typed value of a setting; an error in it names the place where it was written."""
    try:
        return _OPTIONS[setting.option].read(setting.value)
    except ConfigError as error:
        error.path = _shown(setting.place) + error.path.removeprefix(setting.option)
        raise


_OPTIONS: Mapping[str, _Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SpeedPlan, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_PLACES: Mapping[str, list[str]] = {
    name: [f"speed.{name}", *option.places, f"training_params.speed.{name}"]
    for name, option in _OPTIONS.items()
}
