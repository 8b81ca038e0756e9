import signal

import pytest
from ranks import job, run_jobs

JOIN = """
import os, signal, sys, time
import torch
from slipstream import dist
dist.init_dist("pytorch", timeout=120)
rank = dist.get_rank()
dist.report_progress(lambda: f"iteration {57 + rank}")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"

CHILDREN = """
import multiprocessing, os, sys, time
from slipstream import dist

def main(rank, end):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    dist.init_dist("pytorch")
    if rank == 1:
        exec(end)
    elif end != "pass":
        time.sleep(60)

context = multiprocessing.get_context("fork")
children = [context.Process(target=main, args=(rank, os.environ["END"])) for rank in (0, 1)]
for child in children:
    child.start()
for child in children:
    child.join()
print([child.exitcode for child in children])
"""


FORKED = f"""
if rank == 1 and os.fork() == 0:  # like a loader worker, the child inherits every connection
    time.sleep(20)
    os._exit(0)
if rank == 1:
    {KILL}
time.sleep(60)
"""


def asleep(text, rank):
    """Return a script in which rank `rank` runs `text` while the other ranks sleep outside a collective."""
    return f"{JOIN}\nif rank == {rank}:\n    {text}\nelse:\n    time.sleep(60)\n"


def children(end):
    return job(CHILDREN, 1, WORLD_SIZE=2, END=end)


JOBS = {
    "raise0": job(asleep("raise ValueError('no\\nsuch thing')", 0)),
    "raise1": job(asleep("raise ValueError('no\\nsuch thing')", 1)),
    "kill0": job(asleep(KILL, 0), 3),
    "kill1": job(asleep(KILL, 1), 3),
    "forked": job(JOIN + FORKED),
    "apart0": job(f"{JOIN}\ndist.barrier()\nif rank == 0: time.sleep(2); print('late')"),
    "apart1": job(f"{JOIN}\ndist.barrier()\nif rank == 1: time.sleep(2); print('late')"),
    "announced": job(asleep("dist.announce_failure('bad option'); sys.exit(3)", 1)),
    "child0": children("pass"),
    "child3": children("sys.exit(3)"),
    "childkey": children("raise KeyError('k')"),
    "child4": children("os._exit(4)"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return run_jobs(JOBS, tmp_path_factory.mktemp("failures"), timeout=60)


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_prints_a_traceback_and_stops_the_other_ranks(ended, rank):
    raiser, other = (ended[f"raise{rank}"][r] for r in (rank, 1 - rank))
    assert (raiser.status, other.status) == (1, 1)
    assert "Traceback" in raiser.err
    assert "ValueError: no\n" in raiser.err
    assert "src/slipstream" not in raiser.err
    assert other.err == (
        f"slipstream: rank {1 - rank} is stopping at iteration {58 - rank}: "
        f"rank {rank} failed at iteration {57 + rank}: "
        "ValueError: no such thing\n"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_stops_the_other_ranks_within_seconds(ended, rank):
    for other, end in enumerate(ended[f"kill{rank}"]):
        assert end.status == (-signal.SIGKILL if other == rank else 1)
        assert end.seconds < 30
        line = (
            f"slipstream: rank {other} is stopping at iteration {57 + other}: "
            f"rank {rank} exited without reporting an error (killed?)\n"
        )
        assert end.err == ("" if other == rank else line)


def test_killed_rank_is_detected_although_its_forked_child_is_alive(ended):
    first, second = ended["forked"]
    assert (first.status, second.status) == (1, -signal.SIGKILL)
    assert first.seconds < 15, "the failure was detected too late: the forked process ends after 20 s"


@pytest.mark.parametrize("late", [0, 1])
def test_normal_exits_at_different_times_print_nothing(ended, late):
    ends = [(end.status, end.out, end.err) for end in ended[f"apart{late}"]]
    assert ends[late] == (0, "late\n", "")
    assert ends[1 - late] == (0, "", "")


def test_announced_failure_reaches_the_other_ranks(ended):
    first, second = ended["announced"]
    assert (first.status, second.status) == (1, 3)
    assert (
        first.err
        == "slipstream: rank 0 is stopping at iteration 57: rank 1 failed at iteration 58: bad option\n"
    )


@pytest.mark.parametrize(
    ("name", "codes", "message"),
    [
        ("child0", [0, 0], ""),
        ("child3", [1, 3], "rank 1 failed: SystemExit: 3"),
        ("childkey", [1, 1], "rank 1 failed: KeyError: 'k'"),
        ("child4", [1, 4], "rank 1 exited without reporting an error (killed?)"),
    ],
)
def test_exit_of_a_multiprocessing_child_is_reported_correctly(ended, name, codes, message):
    (parent,) = ended[name]
    assert parent.out == f"{codes}\n"
    assert message in parent.err
    assert bool(parent.err) == bool(message)
