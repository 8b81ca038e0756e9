"""MMEngine's parameter schedulers: Slipstream's schedulers, whose state includes their arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import slipstream.optim.scheduler as own
from slipstream.openmmlab.registry import PARAM_SCHEDULERS
from slipstream.optim.scheduler import INF, LRSchedulerMixin, MomentumSchedulerMixin
from slipstream.optim.scheduler.attributes import own_attributes

__all__ = ["INF", "LRSchedulerMixin", "MomentumSchedulerMixin", "_ParamScheduler"]


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


def _define(name: str) -> type:
    base = getattr(own, name)
    content = {"__module__": __name__, "__doc__": f"See `slipstream.optim.scheduler.{name}`."}
    return type(name, (_ParamScheduler, base), content)


for _name in own.__all__:
    if _name.endswith(("LR", "Momentum", "ParamScheduler")) and _name != "_ParamScheduler":
        globals()[_name] = PARAM_SCHEDULERS.register_module(module=_define(_name))
        __all__ += [_name]
