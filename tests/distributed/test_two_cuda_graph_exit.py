"""Test that at exit, CUDA graphs are released before the process group of their collectives is destroyed."""

import pytest
from ranks import job, run_jobs

TRAIN = """
import atexit, multiprocessing
import torch
from slipstream import dist
from slipstream.step.cuda_graph import CapturedCalls

class Graph:
    def __call__(self): pass
    def __del__(self): print("graph", flush=True)

class Capture:
    def warm_up(self, run): return run()
    def capture(self, run): return run(), Graph()

def destroy_process_group():
    print("process group", flush=True)
    destroy()

destroy, torch.distributed.destroy_process_group = (
    torch.distributed.destroy_process_group, destroy_process_group
)

def add_one(arguments):
    return arguments[0] + 1

def train():
    global calls  # global variables are deleted only after all exit functions have run
    calls = CapturedCalls(Capture())
    for _ in range(5):
        calls(add_one, [torch.ones(1)])
"""
SCRIPT = """
dist.init_dist("pytorch")
train()
"""
CHILD = """
def main():
    dist.init_dist("pytorch")
    train()

child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
"""
OWN = """
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()  # a rank that exits immediately would close a connection that the other is still opening
atexit.register(destroy_process_group)
train()
"""
JOBS = {"script": job(TRAIN + SCRIPT), "child": job(TRAIN + CHILD), "own": job(TRAIN + OWN)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return run_jobs(JOBS, tmp_path_factory.mktemp("exits"), timeout=60)


@pytest.mark.parametrize("name", JOBS)
def test_graphs_are_released_before_the_process_group_is_destroyed(ended, name):
    for rank in ended[name]:
        assert rank.err == ""
        assert rank.out.splitlines() == ["graph", "process group"]
