"""A Slurm cluster on the two machines: munged and slurmctld on n1, slurmd on both."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cluster.machines import ADDRESSES, Machine, environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")

# Each machine is configured with eight CPUs and two GPUs, regardless of its hardware. The tests check on which machine
# each process starts, and with which variables. No process opens a GPU, so /dev/null and /dev/zero replace the GPUs.
_CONF = """
ClusterName=tests
SlurmctldHost=n1({n1})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=2
KillWait=5
InactiveLimit=0
GresTypes=gpu
NodeName=n1 NodeAddr={n1} CPUs=8 Gres=gpu:2
NodeName=n2 NodeAddr={n2} CPUs=8 Gres=gpu:2
PartitionName=mm_dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(machines: Mapping[str, Machine], folder: Path) -> Iterator[Machine]:
    """Start the cluster, and stop it at the end of the block. Yield n1, from which jobs are submitted.

    `folder` must be empty. It stores the configuration, the state and the logs of the cluster.
    """
    for name in ("munge", "state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, user=getpass.getuser(), **ADDRESSES))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={_no_cgroups()}\n")
    environ = {"SLURM_CONF": str(conf)}
    first, second = (replace(machines[name], environ=environ) for name in ("n1", "n2"))
    munged = " ".join(f"--{name}={folder}/munge/{name.split('-')[0]}" for name in (
        "socket", "key-file", "log-file", "pid-file", "seed-file"))  # fmt: skip
    with ExitStack() as daemons:
        for machine, command, ready in (
            (
                first,
                f"munged --foreground --force {munged}",
                f"munge --no-input --socket={folder}/munge/socket",
            ),
            (first, "slurmctld -D -c", "scontrol ping"),
            (first, "slurmd -D -N n1", None),
            (second, "slurmd -D -N n2", "sinfo --noheader --states=idle --format=%D | grep -x 2"),
        ):
            daemons.enter_context(machine.running(f"exec {command}", folder))
            if ready:
                _until(first, ready, folder)
        yield first


def _no_cgroups() -> str:
    """Return a value of CgroupPlugin with which Slurm requires no cgroups. It depends on the version of Slurm."""
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True, env=environment())
    return "disabled" if int(re.findall(r"\d+", said.stdout)[0]) >= 24 else "cgroup/v1"


def _until(machine: Machine, question: str, folder: Path, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    scratch = folder / "state"
    while machine.run(question, scratch, timeout).process.returncode != 0:
        if time.monotonic() > end:
            said = [file.read_text(errors="replace")[-2000:] for file in folder.glob("*.txt")]
            raise AssertionError(f"Slurm did not start: {question}\n" + "\n".join(said))
        time.sleep(0.1)
