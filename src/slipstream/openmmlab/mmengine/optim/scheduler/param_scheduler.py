"""Parameter schedulers whose state includes their arguments, as in MMEngine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import slipstream.optim.scheduler.param_scheduler as own
from slipstream.openmmlab.mmengine.registry import PARAM_SCHEDULERS
from slipstream.optim.scheduler.attributes import own_attributes
from slipstream.optim.scheduler.param_scheduler import INF

__all__ = [
    "INF",
    "ConstantParamScheduler",
    "CosineAnnealingParamScheduler",
    "CosineRestartParamScheduler",
    "ExponentialParamScheduler",
    "LinearParamScheduler",
    "MultiStepParamScheduler",
    "OneCycleParamScheduler",
    "PolyParamScheduler",
    "ReduceOnPlateauParamScheduler",
    "StepParamScheduler",
    "_ParamScheduler",
]


class _ParamScheduler(own._ParamScheduler):
    """Slipstream's base class for schedulers, except that `load_state_dict` restores the saved arguments."""

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and all other attributes, including the arguments."""
        attributes = {
            name: list(value) if isinstance(value, deque) else value
            for name, value in own_attributes(self, self._saved_elsewhere).items()
        }
        return {**super().state_dict(), "attributes": attributes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, including the arguments, that was saved by this class or by MMEngine's class."""
        super().load_state_dict(state_dict)
        for name in [n for n in vars(self) if isinstance(getattr(type(self), n, None), cached_property)]:
            delattr(self, name)  # remove cached values that were computed from the old arguments

    def check_attributes(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes to restore. In MMEngine states, they are stored at the top level."""
        known = own_attributes(self, self._saved_elsewhere)
        saved = {name: state_dict[name] for name in known if name in state_dict}
        nested = state_dict.get("attributes", {})
        merged = {**saved, **nested} if isinstance(nested, Mapping) else nested
        return super().check_attributes({**state_dict, "attributes": merged})


@PARAM_SCHEDULERS.register_module()
class ConstantParamScheduler(_ParamScheduler, own.ConstantParamScheduler):
    """See `slipstream.optim.scheduler.ConstantParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingParamScheduler(_ParamScheduler, own.CosineAnnealingParamScheduler):
    """See `slipstream.optim.scheduler.CosineAnnealingParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class CosineRestartParamScheduler(_ParamScheduler, own.CosineRestartParamScheduler):
    """See `slipstream.optim.scheduler.CosineRestartParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class ExponentialParamScheduler(_ParamScheduler, own.ExponentialParamScheduler):
    """See `slipstream.optim.scheduler.ExponentialParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class LinearParamScheduler(_ParamScheduler, own.LinearParamScheduler):
    """See `slipstream.optim.scheduler.LinearParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class MultiStepParamScheduler(_ParamScheduler, own.MultiStepParamScheduler):
    """See `slipstream.optim.scheduler.MultiStepParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class OneCycleParamScheduler(_ParamScheduler, own.OneCycleParamScheduler):
    """See `slipstream.optim.scheduler.OneCycleParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class PolyParamScheduler(_ParamScheduler, own.PolyParamScheduler):
    """See `slipstream.optim.scheduler.PolyParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauParamScheduler(_ParamScheduler, own.ReduceOnPlateauParamScheduler):
    """See `slipstream.optim.scheduler.ReduceOnPlateauParamScheduler`."""


@PARAM_SCHEDULERS.register_module()
class StepParamScheduler(_ParamScheduler, own.StepParamScheduler):
    """See `slipstream.optim.scheduler.StepParamScheduler`."""
