"""The levers, one file each, and the plan that says which of them a run uses."""

from slipstream.speed.compile import CompileOptions, compile_model, read_compile
from slipstream.speed.facts import Facts
from slipstream.speed.plan import CFG_LEVERS, PARAMS_LEVERS, SpeedPlan

__all__ = [
    "CFG_LEVERS",
    "PARAMS_LEVERS",
    "CompileOptions",
    "Facts",
    "SpeedPlan",
    "compile_model",
    "read_compile",
]
