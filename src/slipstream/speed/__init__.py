"""Speed options, and `SpeedPlan`, which contains the options of a run."""

from slipstream.speed.auto import Capabilities
from slipstream.speed.compile import CompileOptions, compile_model, read_compile
from slipstream.speed.plan import CFG_OPTIONS, PARAMS_OPTIONS, SpeedPlan

__all__ = [
    "CFG_OPTIONS",
    "PARAMS_OPTIONS",
    "Capabilities",
    "CompileOptions",
    "SpeedPlan",
    "compile_model",
    "read_compile",
]
