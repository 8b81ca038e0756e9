"""Launchers, the process group, and collectives that also work without a process group."""

from slipstream.dist.collectives import (
    all_gather,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    broadcast,
    gather,
)
from slipstream.dist.data import cast_data_device, get_data_device
from slipstream.dist.failure_detection import announce_failure, report_progress
from slipstream.dist.info import (
    barrier,
    get_backend,
    get_comm_device,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    init_local_group,
    is_distributed,
    is_main_process,
    master_only,
)
from slipstream.dist.launch import check_dist_cfg, init_dist
from slipstream.dist.objects import (
    all_gather_object,
    broadcast_object_list,
    collect_results,
    collect_results_cpu,
    collect_results_gpu,
    gather_named_tensors,
    gather_object,
    own_or_mean,
    sync_random_seed,
)
from slipstream.dist.placement import LAUNCHERS, Launcher, infer_launcher
from slipstream.dist.slurm import expand_nodelist

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "announce_failure",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cast_data_device",
    "check_dist_cfg",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "expand_nodelist",
    "gather",
    "gather_named_tensors",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "master_only",
    "own_or_mean",
    "report_progress",
    "sync_random_seed",
]
