"""Test that docs/mmengine_api.md is up to date, and that Slipstream has all names that the libraries import."""

import importlib

import pytest
from mmengine_page import PAGE, page

# The names that the libraries and mmcv import from modules that Slipstream replaces.
IMPORTED = {
    "mmengine.dist": (
        "all_gather all_gather_object all_reduce barrier broadcast broadcast_object_list collect_results "
        "get_dist_info get_rank get_world_size init_dist is_distributed is_main_process master_only "
        "sync_random_seed"
    ),
    "mmengine.dist.utils": "get_rank",
    "mmengine.evaluator": "BaseMetric DumpResults Evaluator",
    "mmengine.evaluator.metric": "_to_cpu",
    "mmengine.infer.infer": "BaseInferencer ModelType",
    "mmengine.hooks": "EMAHook Hook",
    "mmengine.logging": "MMLogger MessageHub print_log",
    "mmengine.model": (
        "BaseTTAModel is_model_wrapper bias_init_with_prob caffe2_xavier_init constant_init kaiming_init "
        "normal_init stack_batch trunc_normal_init uniform_init xavier_init"
    ),
    "mmengine.model.utils": "revert_sync_batchnorm stack_batch",
    "mmengine.model.weight_init": (
        "caffe2_xavier_init constant_init kaiming_init normal_init trunc_normal_ trunc_normal_init "
        "xavier_init"
    ),
    "mmengine.model.wrappers": "is_model_wrapper",
    "mmengine.optim": "DefaultOptimWrapperConstructor",
    "mmengine.optim.scheduler": "CosineAnnealingParamScheduler PolyLR",
    "mmengine.optim.scheduler.lr_scheduler": "LRSchedulerMixin",
    "mmengine.optim.scheduler.momentum_scheduler": "MomentumSchedulerMixin",
    "mmengine.optim.scheduler.param_scheduler": "INF _ParamScheduler",
    "mmengine.registry": (
        "DefaultScope INFERENCERS RUNNER_CONSTRUCTORS Registry TASK_UTILS init_default_scope"
    ),
    "mmengine.runner": (
        "CheckpointLoader Runner autocast find_latest_checkpoint load_checkpoint save_checkpoint"
    ),
    "mmengine.runner.amp": "autocast",
    "mmengine.runner.checkpoint": (
        "CheckpointLoader _load_checkpoint _load_checkpoint_to_model load_checkpoint load_state_dict"
    ),
    "mmengine.visualization.utils": "img_from_canvas",
}


@pytest.mark.parametrize("module", IMPORTED)
def test_the_names_that_the_libraries_import_exist(module):
    found = importlib.import_module(module)
    missing = []
    for name in IMPORTED[module].split():
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(name)
    assert missing == []


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "the page is outdated; run python tests/openmmlab/mmengine_page.py"
