"""Process-wide settings apply during a run and are restored afterwards."""

import gc
import logging

import pytest
import torch

from slipstream.hooks import Hook
from slipstream.speed import SpeedPlan
from slipstream.speed.apply import running
from tiny_runs import run

LOGGER = logging.getLogger("slipstream")


pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="reads the allocator's settings")


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
    plan = SpeedPlan(cudnn_benchmark=True, expandable_segments=True)
    with running(plan, torch.device("cuda"), LOGGER):
        assert torch.backends.cudnn.benchmark is True
        assert settings() == "expandable_segments:True"
    assert torch.backends.cudnn.benchmark is before
    assert settings() == "expandable_segments:False"


def test_deterministic_runs_disable_cudnn_benchmark():
    torch.use_deterministic_algorithms(True)
    with running(SpeedPlan(cudnn_benchmark=True), torch.device("cuda"), LOGGER):
        assert torch.backends.cudnn.benchmark is False


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
