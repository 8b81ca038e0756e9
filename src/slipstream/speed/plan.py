"""Which levers a run uses: read from three vocabularies into one typed plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, get_type_hints

from slipstream.dataset.feed import read_prefetch
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim import GradClip
from slipstream.speed.activation_checkpointing import (
    ActivationCheckpointingOptions,
    read_activation_checkpointing,
)
from slipstream.speed.adaptive_clip import AdaptiveClipOptions, read_adaptive_clip
from slipstream.speed.auto import choose
from slipstream.speed.compile import CompileOptions, read_compile
from slipstream.speed.doors import GivenHook, Setting, open_doors, settings
from slipstream.speed.ema import EmaOptions, read_ema
from slipstream.speed.facts import Facts
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
from slipstream.speed.words import read_accumulate, read_clip_grad, read_sync_bn

__all__ = ["CFG_LEVERS", "PARAMS_LEVERS", "SpeedPlan"]

CFG_LEVERS = (
    "compile",
    "sync_bn",
    "parallel",
    "model_wrapper_cfg",
    "find_unused_parameters",
    "activation_checkpointing",
    "training_params",
)
"""The keys that a Runner reads from its `cfg` alone."""

PARAMS_LEVERS = (
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
"""The keys of SuperGradients' `training_params` that say something about levers."""


@dataclass(frozen=True)
class _Lever:
    """How a lever is read, and where else than in `speed=` it may stand."""

    read: Callable[[Any], Any]
    places: tuple[str, ...] = ()


def _switch(name: str) -> Callable[[Any], bool]:
    return partial(read_switch, name=name)


def _read_ema(value: Any) -> EmaOptions | GivenHook | None:
    return value if isinstance(value, GivenHook) else read_ema(value)


@dataclass(frozen=True)
class SpeedPlan:
    """The levers of a run. A lever is a line here, and a file that reads its options and applies them."""

    precision: Annotated[
        PrecisionOptions | None,
        _Lever(read_precision, ("optim_wrapper.dtype", "training_params.mixed_precision")),
    ] = None
    compile: Annotated[
        CompileOptions | None, _Lever(read_compile, ("cfg.compile", "training_params.torch_compile"))
    ] = None
    ema: Annotated[
        EmaOptions | GivenHook | None, _Lever(_read_ema, ("custom_hooks.EMAHook", "training_params.ema"))
    ] = None
    sync_bn: Annotated[bool, _Lever(read_sync_bn, ("cfg.sync_bn", "training_params.sync_bn"))] = False
    parallel: Annotated[
        ParallelOptions | None,
        _Lever(read_parallel, ("cfg.parallel", "cfg.model_wrapper_cfg", "training_params.multi_gpu")),
    ] = None
    find_unused_parameters: Annotated[
        bool, _Lever(_switch("find_unused_parameters"), ("cfg.find_unused_parameters",))
    ] = False
    accumulate: Annotated[
        int,
        _Lever(read_accumulate, ("optim_wrapper.accumulative_counts", "training_params.batch_accumulate")),
    ] = 1
    clip_grad: Annotated[
        GradClip | None, _Lever(read_clip_grad, ("optim_wrapper.clip_grad", "training_params.clip_grad_norm"))
    ] = None
    gradient_centralization: Annotated[
        GradientCentralizationOptions | None, _Lever(read_gradient_centralization)
    ] = None
    adaptive_clip: Annotated[AdaptiveClipOptions | None, _Lever(read_adaptive_clip)] = None
    layer_decay: Annotated[LayerDecayOptions | None, _Lever(read_layer_decay)] = None
    sam: Annotated[SamOptions | None, _Lever(read_sam)] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointingOptions | None,
        _Lever(read_activation_checkpointing, ("cfg.activation_checkpointing",)),
    ] = None
    channels_last: Annotated[bool, _Lever(_switch("channels_last"))] = False
    fused: Annotated[bool | None, _Lever(read_fused)] = False
    prefetch: Annotated[int, _Lever(read_prefetch)] = 0
    cuda_graph: Annotated[bool, _Lever(_switch("cuda_graph"))] = False
    nan_guard: Annotated[NanGuardOptions | None, _Lever(read_nan_guard)] = None
    cudnn_benchmark: Annotated[bool, _Lever(_switch("cudnn_benchmark"), ("env_cfg.cudnn_benchmark",))] = False
    expandable_segments: Annotated[bool, _Lever(_switch("expandable_segments"))] = False
    gc: Annotated[int | None, _Lever(read_gc)] = None
    auto: bool = False
    """Whether to switch on what `choose` knows to pay."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each lever that was set was set: `cfg.compile`, `speed.precision`, `auto: why`."""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Why `auto` left a lever off."""

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
        """Read what all doors say; `complete` then adds what depends on the machine and the model.

        Args:
            speed: `'auto'`, or a dict of the fields above, of which `auto=True` is one.
            cfg, optim_wrapper, custom_hooks, env_cfg: those of a Runner, in MMEngine's words.
            training_params: in SuperGradients' words.
            device: kind of device; it settles what a lower precision without a name is.

        Raises:
            ConfigError: a lever is unknown, has a wrong value, or two doors say different things.
        """
        doors = open_doors(
            speed,
            cfg or {},
            optim_wrapper,
            custom_hooks,
            env_cfg,
            {} if training_params is None else training_params,
            device,
        )
        asked = {_asks_for_auto(doors[place], place) for place in ("speed", "training_params.speed")}
        first: dict[str, Setting] = {}
        values: dict[str, Any] = {}
        for setting in settings(_PLACES, doors):
            value, earlier = _read(setting), first.setdefault(setting.lever, setting)
            if values.setdefault(setting.lever, value) != value:
                raise ConfigError(
                    f"{setting.value!r} contradicts {_shown(earlier.place)}={earlier.value!r}: give it in one place",
                    _shown(setting.place),
                )
        sources = {lever: setting.place for lever, setting in first.items()}
        return cls(**values, auto=True in asked, sources=sources)

    def complete(self, facts: Facts) -> SpeedPlan:
        """Return the plan with what `auto` chooses where nobody has said anything.

        Raises:
            ConfigError: the plan cannot work (`slipstream.speed.refused`).
        """
        values: dict[str, Any] = {}
        sources, notes = dict(self.sources), {}
        for choice in choose(facts) if self.auto else ():
            if choice.lever in self.sources:
                continue
            if choice.on:
                values[choice.lever] = choice.value
                sources[choice.lever] = f"auto: {choice.why}"
            else:
                notes[choice.lever] = choice.why
        plan = replace(self, **values, sources=sources, notes=notes)
        check(plan, facts)
        return plan

    @staticmethod
    def levers() -> list[str]:
        """Return the names of all levers."""
        return list(_LEVERS)

    def place(self, lever: str) -> str:
        """Return where the lever was set, as an error names it."""
        return _shown(self.sources.get(lever, lever))


def _asks_for_auto(words: Mapping[str, Any], place: str) -> bool:
    """Check the names of the levers in our own words, and return what they say about `auto`."""
    known = [*_LEVERS, "auto"]
    for word in words:
        if word not in known:
            raise UnknownNameError(f"no such lever{did_you_mean(str(word), known)}", f"{place}.{word}")
    return read_switch(words.get("auto"), f"{place}.auto")


def _shown(place: str) -> str:
    """Return a place as it is written: what a Runner finds in `cfg` stands at the top of a configuration."""
    return place.removeprefix("cfg.")


def _read(setting: Setting) -> Any:
    """Return the typed value of a setting; an error in it names the place where it was written."""
    try:
        return _LEVERS[setting.lever].read(setting.value)
    except ConfigError as error:
        error.path = _shown(setting.place) + error.path.removeprefix(setting.lever)
        raise


_LEVERS: Mapping[str, _Lever] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SpeedPlan, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_PLACES: Mapping[str, list[str]] = {
    name: [f"speed.{name}", *lever.places, f"training_params.speed.{name}"] for name, lever in _LEVERS.items()
}
