"""Test that docs/mmengine_api.md is up to date, and that Slipstream has all names that the libraries import."""

import importlib

import pytest
from mmengine_page import PAGE, compare, has_module, load, missing_reason, page

import slipstream.openmmlab  # noqa: F401

# The names that the libraries and mmcv import, by module.
IMPORTED = {
    "mmengine": (
        "Config ConfigDict DictAction DefaultScope FileClient MMLogger MODELS MessageHub ProgressBar "
        "digit_version dump exists fileio get get_file_backend get_local_path is_abs is_list_of is_seq_of "
        "is_str is_tuple_of join_path list_dir_or_file list_from_file load mkdir_or_exist put "
        "track_parallel_progress track_progress utils"
    ),
    "mmengine.analysis": "get_model_complexity_info",
    "mmengine.analysis.print_helper": "_format_size",
    "mmengine.dataset": "BaseDataset Compose force_full_init",
    "mmengine.device": (
        "get_device get_max_cuda_memory is_cuda_available is_mlu_available is_mps_available is_npu_available"
    ),
    "mmengine.dist": (
        "all_gather all_gather_object all_reduce barrier broadcast broadcast_object_list collect_results "
        "get_dist_info get_rank get_world_size init_dist is_distributed is_main_process master_only "
        "sync_random_seed"
    ),
    "mmengine.dist.utils": "get_rank",
    "mmengine.evaluator": "BaseMetric DumpResults Evaluator",
    "mmengine.evaluator.metric": "_to_cpu",
    "mmengine.fileio": (
        "BaseStorageBackend LocalBackend dump exists get get_file_backend get_local_path get_text isdir "
        "join_path list_dir_or_file list_from_file load"
    ),
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
    "mmengine.structures": "BaseDataElement InstanceData LabelData PixelData",
    "mmengine.utils": (
        "ProgressBar Timer check_file_exist deprecated_api_warning digit_version get_git_hash "
        "get_installed_path is_abs is_filepath is_list_of is_seq_of is_str is_tuple_of mkdir_or_exist "
        "progressbar requires_executable scandir slice_list to_2tuple track_iter_progress "
        "track_parallel_progress track_progress"
    ),
    "mmengine.utils.dl_utils": "TORCH_VERSION collect_env is_norm mmcv_full_available set_multi_processing",
    "mmengine.utils.dl_utils.parrots_wrapper": (
        "SyncBatchNorm TORCH_VERSION _BatchNorm _InstanceNorm is_rocm_pytorch"
    ),
    "mmengine.utils.path": "mkdir_or_exist",
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


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "the page is outdated; run python tests/openmmlab/mmengine_page.py"


def test_every_missing_name_has_a_reason_and_every_reason_is_used():
    from mmengine_page import REASONS

    missing = [path for path, entry in load()["names"].items() if compare(path, entry)[0] == "missing"]
    assert all(missing_reason(path) for path in missing)
    for prefixes, _ in REASONS:
        assert any(path.startswith(prefixes) for path in missing), prefixes


def test_names_are_compared_with_their_parameters_and_attributes():
    hook = {"at": ["mmengine.hooks.hook"], "parameters": "", "members": ["before_run"]}
    assert compare("mmengine.hooks.Hook", hook) == ("same", [])
    assert compare("mmengine.hooks.Nothing", hook)[0] == "missing"
    assert compare("mmengine.hooks.Hook", {**hook, "parameters": "a, b="}) == (
        "differs",
        ["no parameters `a`, `b`"],
    )
    assert compare("mmengine.hooks.Hook", {**hook, "members": ["fly"]}) == (
        "differs",
        ["no attribute `fly`"],
    )
    assert compare("mmengine.hooks.Hook", {**hook, "at": ["mmengine.none"]}) == (
        "differs",
        ["not in `mmengine.none`"],
    )
    assert has_module("mmengine.hooks.hook")
    assert not has_module("mmengine.hooks.none.deeper")
