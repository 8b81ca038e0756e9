"""`slipstream submit`: train on a Slurm cluster, by a batch file that a user can read and keep."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from slipstream.cli.configure import command_words, configure
from slipstream.errors import ConfigError, DistributedError

__all__ = ["batch_file", "run"]

_FILE = "submit.sbatch"


def run(args: argparse.Namespace) -> int:
    """Write the batch file into the work_dir, hand it to sbatch, and print the job's number."""
    cfg = configure(args)
    work_dir = Path(cfg.work_dir).absolute()
    text = batch_file(args, work_dir)
    if args.dry_run:
        print(text, end="")
        return 0
    start = _start(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / _FILE
    path.write_text(text)
    job = _sbatch(path)
    print(f"Submitted job {job}, which {start}. It is written in {path}; logs in {work_dir}/slurm-{job}.log")
    return 0


def batch_file(args: argparse.Namespace, work_dir: Path) -> str:
    """Return the text of the batch file: a bash script whose options for sbatch stand at its top."""
    for path in (work_dir, Path.cwd()):
        if not str(path).isprintable():
            raise ConfigError(
                f"a folder's name with a line break cannot stand in a batch file: {str(path)!r}"
            )
    words = command_words(args, command="train", work_dir=str(work_dir), launcher="slurm", resume=True)
    srun = ["srun", "--kill-on-bad-exit=1"]
    if args.cpus_per_task:
        srun.append(f"--cpus-per-task={args.cpus_per_task}")  # srun does not take it from the job
    command = shlex.join([*srun, sys.executable, "-m", "slipstream", *words])
    options = "\n".join(f"#SBATCH {option}" for option in _options(args, work_dir))
    return _TEMPLATE.format(
        file=shlex.quote(str(work_dir / _FILE)),
        options=options,
        requeue=_REQUEUE if args.requeue else "",
        command=f"{command} &\n{_WAIT}" if args.requeue else command,
    )


_TEMPLATE = """\
#!/bin/bash
# Written by `slipstream submit`. It can be changed, kept, and submitted again: sbatch {file}
# Every run of it goes on from the last checkpoint in its --work-dir, or starts anew if there is none.
{options}

set -eu

# Each process has the cores that Slurm gave to its task.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
{requeue}
# One process for each task; if one fails, all end.
{command}
"""

_REQUEUE = """
# Two minutes before its time limit the job queues itself again, and goes on from its last checkpoint: it must write one
# within that time (default_hooks.checkpoint.interval), or it never gets any further.
trap 'scontrol requeue "$SLURM_JOB_ID" || true' USR1
"""

_WAIT = "wait $! || wait $!  # the signal ends the first one, but not srun"


def _options(args: argparse.Namespace, work_dir: Path) -> list[str]:
    tasks = args.gpus_per_node.rpartition(":")[2] if args.gpus_per_node else args.tasks_per_node
    given = {
        "job-name": args.job_name or Path(args.config).stem,
        "partition": args.partition,
        "account": args.account,
        "qos": args.qos,
        "time": args.time,
        "nodes": args.nodes,
        "gpus-per-node": args.gpus_per_node,
        "ntasks-per-node": int(tasks),
        "cpus-per-task": args.cpus_per_task,
        "mem": args.mem,
        "chdir": Path.cwd(),
        "output": f"{str(work_dir).replace('%', '%%')}/slurm-%j.log",
        "open-mode": "append",  # a job that is queued again goes on with its log
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in given.items() if value is not None]
    if args.requeue:
        options += ["--requeue", "--signal=B:USR1@120"]
    return options + [option if option.startswith("-") else f"--{option}" for option in args.sbatch]


def _start(work_dir: Path) -> str:
    from slipstream.checkpoint import find_latest_checkpoint

    latest = find_latest_checkpoint(work_dir)
    return f"goes on from {latest}" if latest else "starts anew"


def _sbatch(path: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise DistributedError(
            f"there is no sbatch on this machine: submit {path} on a machine of the Slurm cluster"
        ) from None
    except subprocess.CalledProcessError as error:
        raise DistributedError(f"sbatch refused {path}: {' '.join(error.stderr.split())}") from None
    return done.stdout.strip().partition(";")[0]  # JOB or JOB;CLUSTER
