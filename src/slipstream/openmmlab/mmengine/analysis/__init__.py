"""Count the operations, activations and parameters of a model."""

from slipstream.openmmlab.mmengine.analysis.complexity_analysis import (
    ActivationAnalyzer,
    FlopAnalyzer,
    activation_count,
    flop_count,
    parameter_count,
    parameter_count_table,
)
from slipstream.openmmlab.mmengine.analysis.print_helper import get_model_complexity_info

__all__ = [
    "ActivationAnalyzer",
    "FlopAnalyzer",
    "activation_count",
    "flop_count",
    "get_model_complexity_info",
    "parameter_count",
    "parameter_count_table",
]
