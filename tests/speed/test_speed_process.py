"""Process-wide settings apply during a run and are restored afterwards."""

import gc
from itertools import pairwise

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.hooks import GcHook, Hook
from slipstream.runner import Runner
from slipstream.speed import process
from slipstream.speed.process import (
    cuda_settings,
    cudnn_benchmark,
    expandable_segments,
    read_bool,
    read_gc,
)
from tiny_runs import loader, run, training, validation


def settings():
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def _restore_settings():
    before, enabled = settings(), gc.isenabled()
    yield
    torch._C._accelerator_setAllocatorSettings(before)
    gc.unfreeze()
    if enabled:
        gc.enable()


def test_settings_are_restored_after_the_context():
    before = torch.backends.cudnn.benchmark
    with cuda_settings(benchmark=True, expandable=True, warn=pytest.fail):
        assert torch.backends.cudnn.benchmark is True
        assert settings() == "expandable_segments:True"
    assert torch.backends.cudnn.benchmark is before
    assert settings() == "expandable_segments:False"


def test_disabled_settings_do_not_change():
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    with cuda_settings(benchmark=False, expandable=False, warn=pytest.fail):
        assert torch.backends.cudnn.benchmark is False
        assert settings() == "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("before", "during", "after"),
    [
        (
            "max_split_size_mb:64",
            "max_split_size_mb:64,expandable_segments:True",
            "max_split_size_mb:64,expandable_segments:False",
        ),
        (
            "expandable_segments:True,max_split_size_mb:64",
            "expandable_segments:True,max_split_size_mb:64,expandable_segments:True",
            "expandable_segments:True,max_split_size_mb:64",
        ),
    ],
)
def test_other_allocator_settings_do_not_change(before, during, after):
    torch._C._accelerator_setAllocatorSettings(before)
    seen = []

    def fail():
        with expandable_segments(pytest.fail):
            seen.append(settings())
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        fail()
    assert [*seen, settings()] == [during, after]


def test_memory_reserved_before_the_run_causes_a_warning(monkeypatch):
    monkeypatch.setattr(process, "_reserved_bytes", lambda: 48 * 2**20)
    lines = []
    with expandable_segments(lines.append):
        pass
    assert len(lines) == 1
    assert lines[0].startswith("expandable_segments does not affect the 48 MiB")


def test_memory_is_not_queried_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: pytest.fail("memory_reserved was called"))
    with expandable_segments(pytest.fail):
        pass


def test_deterministic_runs_disable_cudnn_benchmark():
    torch.use_deterministic_algorithms(True)
    with cudnn_benchmark():
        assert torch.backends.cudnn.benchmark is False


def test_option_values_are_read():
    assert read_bool(None, "x") is read_bool(False, "x") is False
    assert read_bool(True, "x") is True
    assert read_gc(None) is read_gc(False) is None
    assert read_gc(500) == 500


@pytest.mark.parametrize("value", [0, -1, True, "100", 1.5])
def test_invalid_gc_interval_raises_an_error(value):
    with pytest.raises(ConfigError, match=r"^gc: must be the number of steps"):
        read_gc(value)


@pytest.mark.parametrize("value", [1, "yes"])
def test_invalid_switch_raises_an_error(value):
    with pytest.raises(ConfigError, match=r"^cudnn_benchmark: must be True or False"):
        read_bool(value, "cudnn_benchmark")


# ---- garbage collection ------------------------------------------------------------------------------


class Watch(Hook):
    """A hook that records the steps with a garbage collection, and the collector's state after each step."""

    priority = "LOWEST"

    def __init__(self, fail_at=None):
        self.collected, self.automatic, self.frozen, self.fail_at = [], [], [], fail_at

    def before_train(self, runner):
        self.count = gc.get_stats()[2]["collections"]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        now = gc.get_stats()[2]["collections"]
        if now > self.count:
            self.collected.append(runner.iter + 1)
        self.count = now
        self.automatic.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        if self.fail_at == runner.iter + 1:
            raise RuntimeError("diverged")


def test_gc_runs_only_at_the_configured_steps(tmp_path):
    watch = Watch()
    run(tmp_path, custom_hooks=[dict(type="GcHook", interval=3, warmup=2), watch])
    # After the warm-up, the hook collects garbage at the third step, and then at every multiple of three.
    assert watch.automatic == [True] * 2 + [False] * 8
    assert watch.collected[-3:] == [3, 6, 9]
    assert watch.frozen[2] > 1000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_resumed_run_collects_at_the_same_steps(tmp_path):
    run(tmp_path, train_cfg=dict(by_epoch=True, max_epochs=1))
    watch = Watch()
    hooks = [dict(type="GcHook", interval=4, warmup=0), watch]
    run(tmp_path, custom_hooks=hooks, resume=True)
    # The resumed run starts at step 6, where the hook collects garbage before it disables automatic collection.
    assert watch.collected == [6, 8]


def test_validation_collects_garbage(tmp_path):
    counts = []

    class Count(Hook):
        priority = "LOWEST"

        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            counts.append(gc.get_stats()[2]["collections"])

    hooks = [dict(type="GcHook", interval=2, warmup=0), Count()]
    run(tmp_path, custom_hooks=hooks, train_cfg=dict(by_epoch=True, max_epochs=1), **validation())
    assert [b > a for a, b in pairwise(counts)] == [True, False, True, False]


def test_run_shorter_than_the_warmup_does_not_change_gc(tmp_path):
    watch = Watch()
    run(tmp_path, custom_hooks=[GcHook(interval=1, warmup=50), watch])
    assert all(watch.automatic)


def test_release_restores_gc_after_a_failure(tmp_path):
    hook = GcHook(interval=3, warmup=0)
    runner = Runner(**training(tmp_path, custom_hooks=[hook, Watch(fail_at=4)], train_dataloader=loader()))
    with pytest.raises(RuntimeError, match="diverged"):
        runner.train()
    hook.release(runner)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_disabled_gc_remains_disabled(tmp_path):
    gc.disable()
    run(tmp_path, custom_hooks=[GcHook(interval=3, warmup=1)])
    assert not gc.isenabled()


@pytest.mark.parametrize("options", [dict(interval=0), dict(interval=5, warmup=-1)])
def test_invalid_hook_options_raise_an_error(options):
    with pytest.raises(ConfigError, match=r"(interval|warmup): must be an int of at least"):
        GcHook(**options)


def test_torch_without_a_getter_uses_the_initial_settings(monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")
    written = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", written.append)
    with expandable_segments(pytest.fail):
        pass
    assert written == [
        "max_split_size_mb:32,expandable_segments:True",
        "max_split_size_mb:32,expandable_segments:False",
    ]
    monkeypatch.undo()
