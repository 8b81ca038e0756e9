"""Launchers, the process group, and collectives that also work without a process group."""

from slipstream.dist import collectives, info, objects
from slipstream.dist.collectives import *  # noqa: F403
from slipstream.dist.failure_detection import announce_failure, another_rank_failed, report_progress
from slipstream.dist.info import *  # noqa: F403
from slipstream.dist.launch import check_dist_cfg, init_dist
from slipstream.dist.objects import *  # noqa: F403
from slipstream.dist.placement import LAUNCHERS, Launcher, expand_nodelist, infer_launcher

__all__ = [
    "LAUNCHERS", "Launcher", "announce_failure", "another_rank_failed", "check_dist_cfg", "expand_nodelist",
    "infer_launcher", "init_dist", "report_progress",
]  # fmt: skip
__all__ += collectives.__all__
__all__ += info.__all__
__all__ += objects.__all__
