"""Run scripts as the ranks of many concurrent jobs: one process imports torch and forks all ranks.

Each rank ends like any other program, at the end of its script, so its exit hooks run.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MV2_", "MPI_", "TORCHELASTIC_", "LOCAL_WORLD_SIZE")


@dataclass
class Ended:
    status: int  # exit status, or the negative number of the signal that killed the rank
    out: str
    err: str
    moment: float
    seconds: float  # seconds since the first rank of the job ended


def job(script, world=2, **environ):
    """Return the script of a job and the environment variables of each rank.

    The value of a variable in `environ` is the same on all ranks, or a list with one value per rank.
    """
    from ports import free_port  # not importable when this file runs as a program

    port = environ.pop("MASTER_PORT", None) or free_port()
    ranks = []
    for rank in range(world):
        own = {
            name: str(value[rank] if isinstance(value, list) else value) for name, value in environ.items()
        }
        place = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port))
        ranks.append(dict(MASTER_ADDR="127.0.0.1") | place | own)
    return textwrap.dedent(script), ranks


def run_jobs(jobs, folder, timeout=60):
    """Run all jobs {name: job} concurrently. Return {name: [Ended of rank 0, ...]}. Kill ranks that time out."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, __file__, str(folder), str(timeout)]
    subprocess.run(command, env=clean, input=json.dumps(jobs), text=True, check=True, timeout=timeout + 60)
    ends = json.loads((folder / "ends.json").read_text())
    answers = {}
    for name in jobs:
        first = min(moment for _, moment in ends[name])
        for rank, (status, moment) in enumerate(ends[name]):
            out, err = ((folder / f"{name}.{rank}.{kind}").read_text() for kind in ("out", "err"))
            answers.setdefault(name, []).append(Ended(status, out, err, moment, moment - first))
    return answers


def _run_rank(name, rank, environ, folder):
    """Set the environment variables of a rank in this forked process, and redirect its output to files."""
    os.environ.update(environ)
    for kind, number in (("out", 1), ("err", 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(folder / f"{name}.{rank}.{kind}", flags), number)


def _wait(children, jobs, timeout):
    """Wait for the children {pid: (name, rank)}. Return {name: [[exit status, end time], ...]}."""
    ends = {name: [None] * len(ranks) for name, (_, ranks) in jobs.items()}
    deadline = time.monotonic() + timeout
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, rank = children.pop(pid)
            ends[name][rank] = [os.waitstatus_to_exitcode(status), time.monotonic()]
        elif time.monotonic() > deadline:
            for late in children:
                os.kill(late, signal.SIGKILL)
            deadline += 1000
        else:
            time.sleep(0.01)
    return ends


def _start(jobs, folder):
    """Fork every rank. Return {pid: (name, rank)} in this process, and a script to run in each child."""
    children = {}
    for name, (script, ranks) in jobs.items():
        for rank, environ in enumerate(ranks):
            pid = os.fork()
            if pid == 0:
                _run_rank(name, rank, environ, folder)
                return None, script
            children[pid] = name, rank
    return children, None


if __name__ == "__main__":
    import torch

    import slipstream.dist  # noqa: F401  import it only once, before the fork

    torch.set_num_threads(1)
    gc.freeze()  # otherwise, garbage collection at exit scans all torch objects in each rank
    folder, timeout, jobs = Path(sys.argv[1]), float(sys.argv[2]), json.load(sys.stdin)
    children, script = _start(jobs, folder)
    if script is not None:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    else:
        (folder / "ends.json").write_text(json.dumps(_wait(children, jobs, timeout)))
