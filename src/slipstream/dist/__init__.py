"""Who takes part: launchers, the process group, and collectives that also work without one."""

from slipstream.dist.collectives import (
    all_gather_object,
    all_reduce,
    broadcast,
    broadcast_object_list,
    collect_results,
    sync_random_seed,
)
from slipstream.dist.info import (
    barrier,
    get_backend,
    get_comm_device,
    get_dist_info,
    get_local_rank,
    get_rank,
    get_world_size,
    is_distributed,
    is_main_process,
    master_only,
)
from slipstream.dist.launch import LAUNCHERS, Launcher, init_dist

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "collect_results",
    "get_backend",
    "get_comm_device",
    "get_dist_info",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_dist",
    "is_distributed",
    "is_main_process",
    "master_only",
    "sync_random_seed",
]
