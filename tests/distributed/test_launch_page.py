"""Tests of the code blocks in docs/distributed.md. Other test files run the shell blocks."""

from pathlib import Path

import pytest
from cluster.evidence import FAILING, words
from cluster.machines import ROOT
from cluster.page import blocks

TESTED = {  # test files that run the shell blocks of each section
    "One machine": "test_launch_one_machine.py",
    "Sharding": "test_launch_one_machine.py",
    "Two machines": "test_launch_two_machines.py",
    "Slurm": "test_launch_slurm.py",
    "MPI": "test_launch_mpi.py",
}
SNIPPETS = FAILING.with_name("page_snippets.py")


def test_every_shell_block_is_tested():
    assert {block.section for block in blocks() if block.language == "bash"} == set(TESTED)
    for section, file in TESTED.items():
        assert f'commands("{section}")' in Path(__file__).with_name(file).read_text()
    assert {block.language for block in blocks()} == {"bash", "python", "text"}


@pytest.mark.slow
def test_python_blocks_train_in_two_processes(machine, folder):
    path = f"{ROOT}:{ROOT}/tests:{ROOT}/tests/distributed"
    run = machine.run(f"torchrun --nproc-per-node=2 {SNIPPETS}", folder, PYTHONPATH=path).succeeded()
    said = words(run)
    assert said.count("wrapped by MMDistributedDataParallel True") == 2
    assert said.count("wrapped by CustomDistributedDataParallel False") == 2
    assert said.count("wrapped by MMFullyShardedDataParallel") == 2


@pytest.mark.slow
def test_messages_of_a_failing_rank_match_the_page(machines, folder):
    raised, killed = [block.text for block in blocks() if "rank 0 is stopping" in block.text]
    for how, expected in (("raise", raised), ("kill", killed)):
        # torchrun is not used, because it ends rank 0 before rank 0 prints its message.
        start = "LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python"
        run = machines["n1"].run(
            f"RANK=1 {start} {FAILING} pytorch {how} away & RANK=0 {start} {FAILING} pytorch {how} away; wait",
            folder,
        )
        for line in expected.splitlines():
            assert line in words(run), run.output
