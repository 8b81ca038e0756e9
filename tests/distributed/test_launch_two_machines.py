"""Tests of the commands for two machines in docs/distributed.md."""

import pytest
from cluster.evidence import FAILING, ended_by_rank_1, trained
from cluster.machines import ADDRESSES
from cluster.page import commands

pytestmark = pytest.mark.slow


def test_documented_commands_train_as_one_job(machines, folder):
    first, second = commands("Two machines")
    second = second.replace("ip_of_the_first_machine", ADDRESSES["n1"])
    with machines["n1"].running(first, folder) as one, machines["n2"].running(second, folder) as two:
        one.wait().succeeded()
        two.wait().succeeded()
    trained(folder, processes=4, steps=10)


@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.exhaustive)])
def test_failing_rank_ends_the_processes_on_both_machines(machines, folder, how):
    command = (
        "torchrun --nnodes 2 --node-rank {rank} --nproc-per-node=1 --master-port 29500 --master-addr {address} "
        f"{FAILING} pytorch {how} away"
    )
    first = command.format(rank=0, address="127.0.0.1")
    second = command.format(rank=1, address=ADDRESSES["n1"])
    with machines["n1"].running(first, folder) as one, machines["n2"].running(second, folder) as two:
        two.wait(60).failed()
        one.wait(60).failed()
    # Each machine prints its own output. The second machine prints the traceback of rank 1.
    ended_by_rank_1(two, how)
