"""Tests of commands in docs/distributed.md for torchrun, torch.distributed.launch and `slipstream train --nproc`."""

import pytest
from cluster.evidence import FAILING, ended_by_rank_1, trained
from cluster.page import commands

pytestmark = pytest.mark.slow

# The dataset has 1280 images or 32 scenes, and each of the two processes uses batches of 32 images or 4 scenes.
STEPS = {"examples/distributed_training.py": 20, "street_scenes_pp_lite_t": 4}


def _command(text):
    """Return a command as a test parameter.

    Commands that select GPUs, use `torch.distributed.launch`, which is equivalent to torchrun, or train the recipe that
    is also trained with sharding run only in exhaustive tests.
    """
    marks = pytest.mark.exhaustive if not text.startswith("torchrun") else ()
    return pytest.param(text, id=" ".join(text.split()[:2]), marks=marks)


@pytest.mark.parametrize("command", [_command(text) for text in commands("One machine")])
def test_documented_command_trains_in_two_processes(machine, folder, command):
    machine.run(command, folder).succeeded()
    trained(folder, processes=2, steps=next(steps for what, steps in STEPS.items() if what in command))


@pytest.mark.parametrize("command", commands("Sharding"))
def test_documented_sharded_training_writes_one_checkpoint_file(machine, folder, command):
    machine.run(command, folder).succeeded()
    trained(folder, processes=2, steps=4)
    assert (folder / "work_dirs/street_scenes_pp_lite_t/epoch_1.pth").is_file()


@pytest.mark.parametrize(
    ("how", "others"), [pytest.param("raise", "busy", marks=pytest.mark.exhaustive), ("kill", "away")]
)
def test_failing_rank_ends_the_job_under_torchrun(machine, folder, how, others):
    run = machine.run(f"torchrun --nproc-per-node=2 {FAILING} pytorch {how} {others}", folder)
    ended_by_rank_1(run, how)
