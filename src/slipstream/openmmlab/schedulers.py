"""MMEngine's parameter schedulers: Slipstream's schedulers, whose state includes their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import slipstream.optim.scheduler as own
from slipstream.openmmlab.registry import PARAM_SCHEDULERS
from slipstream.optim.scheduler import INF, LRSchedulerMixin, MomentumSchedulerMixin

__all__ = ["INF", "LRSchedulerMixin", "MomentumSchedulerMixin", "_ParamScheduler"]


class _ParamScheduler(own._ParamScheduler):
    """Slipstream's base class for schedulers, except that `load_state_dict` restores the saved arguments."""

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and all other attributes, including the arguments."""
        return {**super().state_dict(), "attributes": self._own_attributes()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, including the arguments, that was saved by this class or by MMEngine's class."""
        # In MMEngine's states, the attributes are stored at the top level.
        saved = {name: state_dict[name] for name in self._own_attributes() if name in state_dict}
        super().load_state_dict({**state_dict, "attributes": {**saved, **state_dict.get("attributes", {})}})
        for name in [n for n in vars(self) if isinstance(getattr(type(self), n, None), cached_property)]:
            delattr(self, name)  # remove cached values that were computed from the old arguments


def _define(name: str) -> type:
    base = getattr(own, name)
    content = {"__module__": __name__, "__doc__": f"See `slipstream.optim.scheduler.{name}`."}
    return type(name, (_ParamScheduler, base), content)


for _name in own.__all__:
    if _name.endswith(("LR", "Momentum", "ParamScheduler")) and _name != "_ParamScheduler":
        globals()[_name] = PARAM_SCHEDULERS.register_module(module=_define(_name))
        __all__ += [_name]
