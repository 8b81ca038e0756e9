"""Tests of inferred metric rules, of intervals in epochs or iterations, and of hooks after a failure."""

import pytest
import torch
from torch.utils.data import TensorDataset

from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import Net, run, samples


def make(tmp_path, **options):
    torch.manual_seed(0)
    return Runner(
        Net(),
        str(tmp_path),
        train_dataloader=dict(batch_size=8, dataset=TensorDataset(*samples()), drop_last=True),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        log_level="ERROR",
        randomness=dict(seed=0),
        **options,
    )


def test_training_weights_are_restored_after_a_failed_validation(tmp_path):
    class FailsOnce(BaseMetric):
        failed = False

        def process(self, data_batch, data_samples):
            self.results.append(0)
            if not self.failed:
                type(self).failed = True
                raise OSError("disk")

        def compute_metrics(self, results):
            return {"acc": 1.0}

    def run(metric, folder):
        return make(
            folder,
            train_cfg=dict(by_epoch=True, max_epochs=1),
            val_dataloader=dict(batch_size=8, dataset=TensorDataset(*samples())),
            val_cfg=dict(),
            val_evaluator=dict(type=metric),
            custom_hooks=[dict(type="EMAHook", momentum=0.3)],
        )

    broken = run(FailsOnce, tmp_path / "a")
    with pytest.raises(OSError, match="disk") as raised:
        broken.train()
    assert any("validation after epoch 1," in note for note in raised.value.__notes__)
    average = [p.clone() for p in broken.model.parameters()]
    broken.val()  # validates the average and restores the weights
    healthy = run(FailsOnce, tmp_path / "b")
    healthy.train()
    for now, wanted, averaged in zip(
        broken.model.parameters(), healthy.model.parameters(), average, strict=True
    ):
        assert torch.equal(now, wanted)
        assert not torch.equal(averaged, wanted)


class Releases(Hook):
    """A hook that holds a resource during a run, and can fail in a step or when it releases the resource."""

    def __init__(self, released, name, fails_in=()):
        self.released, self.name, self.fails_in = released, name, fails_in

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if "step" in self.fails_in:
            raise ValueError("in a step")

    def release(self, runner):
        self.released.append((self.name, type(runner.error).__name__))
        if "release" in self.fails_in:
            raise ValueError("in release")


@pytest.mark.parametrize(
    ("fails_in", "error", "message"),
    [(("step",), "ValueError", "in a step"), (("release",), "NoneType", "in release")],
)
def test_all_hooks_release_their_resources_after_an_error(tmp_path, fails_in, error, message):
    released = []
    hooks = [Releases(released, "a"), Releases(released, "b", fails_in), Releases(released, "c")]
    with pytest.raises(ValueError, match=message):
        run(tmp_path, custom_hooks=hooks, train_cfg=dict(by_epoch=True, max_epochs=1))
    assert released == [("c", error), ("b", error), ("a", error)]
