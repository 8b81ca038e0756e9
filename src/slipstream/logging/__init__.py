"""Logger, message hub, scalar histories and progress bar."""

from slipstream.logging.history import HistoryBuffer
from slipstream.logging.logger import RUN_FAILED, MMLogger, build_logger, print_log
from slipstream.logging.message_hub import MessageHub
from slipstream.logging.meter import Meter
from slipstream.logging.phases import STEP_PHASES, Phase, PhaseTimes
from slipstream.logging.progress import ProgressBar

__all__ = [
    "RUN_FAILED", "STEP_PHASES", "HistoryBuffer", "MMLogger", "MessageHub", "Meter", "Phase", "PhaseTimes",
    "ProgressBar", "build_logger", "print_log",
]  # fmt: skip
