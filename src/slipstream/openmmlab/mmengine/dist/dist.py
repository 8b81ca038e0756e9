"""Collectives, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.dist import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    broadcast,
    broadcast_object_list,
    collect_results,
    collect_results_cpu,
    collect_results_gpu,
    gather,
    gather_object,
    sync_random_seed,
)

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "broadcast",
    "broadcast_object_list",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "gather",
    "gather_object",
    "sync_random_seed",
]
