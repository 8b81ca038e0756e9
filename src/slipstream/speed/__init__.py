"""Speed options, and `SpeedPlan`, which contains the options of a run."""

from slipstream.speed.auto import Capabilities
from slipstream.speed.compile import CompileOptions
from slipstream.speed.front_ends import CFG_OPTIONS, PARAMS_OPTIONS
from slipstream.speed.plan import SpeedPlan

__all__ = ["CFG_OPTIONS", "PARAMS_OPTIONS", "Capabilities", "CompileOptions", "SpeedPlan"]
