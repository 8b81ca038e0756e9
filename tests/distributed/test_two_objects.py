"""Test that two processes weight losses with `averaged_over` as one process does with one large batch."""

import pytest
import torch
from two_processes import run_in_two

from slipstream.dist import init_dist
from slipstream.runner import Runner
from weighted_losses import BATCHES, CLIP, WINDOW, Net, Samples, from_whole_windows, train

pytestmark = pytest.mark.slow  # starts processes


def eager(folder):
    init_dist("pytorch")
    return train()


def compiled(folder):
    return train(compile=dict(backend="eager"))


def runner(folder, **options):
    """Save within a window, and return the weights at the end."""
    parts = dict(
        train_dataloader=dict(
            dataset=Samples(), batch_size=3, sampler=dict(type="DefaultSampler", shuffle=False)
        ),
        train_cfg=dict(by_epoch=False, max_iters=BATCHES),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.5, momentum=0.9),
            accumulative_counts=WINDOW,
            clip_grad=dict(max_norm=CLIP),
        ),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False)),
    )
    run = Runner(Net(), folder, **parts | options)
    run.train()
    weights = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in run.model.state_dict().items()}
    return {name.removeprefix("module.").removeprefix("net."): w for name, w in weights.items()}


def sharded(folder):
    return runner(folder, speed=dict(parallel=dict(type="fsdp2")))


def resumed(folder):
    return runner(folder, load_from=folder.parent / "runner" / "iter_4.pth", resume=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_in_two([eager, compiled, runner, resumed, sharded], folder, timeout=120)


@pytest.mark.parametrize("case", ["eager", "compiled", "runner", "resumed", "sharded"])
def test_two_processes_equal_one_large_batch(answers, case):
    for weights in answers[1][case]:
        assert isinstance(weights, dict), weights
        torch.testing.assert_close(weights, dict(from_whole_windows()), rtol=1e-12, atol=1e-14)


def test_one_process_continues_a_window_of_two(answers, tmp_path):
    loader = dict(dataset=Samples(), batch_size=6, sampler=dict(type="DefaultSampler", shuffle=False))
    found = runner(
        tmp_path, train_dataloader=loader, load_from=answers[0] / "runner" / "iter_4.pth", resume=True
    )
    torch.testing.assert_close(found, dict(from_whole_windows()), rtol=1e-12, atol=1e-14)
