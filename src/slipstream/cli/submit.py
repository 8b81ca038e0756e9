"""`slipstream submit`: train on a cluster. This module writes and submits the Slurm batch script."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from slipstream.cli.configure import command_args, configure
from slipstream.cli.submit_checks import check_options, check_secrets, tasks_per_node
from slipstream.errors import ConfigError, DistributedError

__all__ = ["batch_file", "run"]

_FILE = "submit.sbatch"


def run(args: argparse.Namespace) -> int:
    """Submit a Slurm job, write a Kubernetes job manifest, or train on a Ray cluster."""
    check_options(args)
    if args.to == "kubernetes":
        from slipstream.cli.submit_kubernetes import run as write_manifest

        return write_manifest(args)
    if args.to == "ray":
        from slipstream.cli.submit_ray import run as train_on_ray

        return train_on_ray(args)
    return _submit_to_slurm(args)


def _submit_to_slurm(args: argparse.Namespace) -> int:
    """Write the batch script to the work_dir, submit it with sbatch, and print the job id."""
    cfg = configure(args)
    work_dir = Path(cfg.work_dir).absolute()
    text = batch_file(args, work_dir)
    if args.dry_run:
        print(text, end="")
        return 0
    start = _start_description(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / _FILE
    path.write_text(text)
    job = _sbatch(path)
    print(f"Submitted job {job}, which {start}. Batch script: {path}; log: {work_dir}/slurm-{job}.log")
    return 0


def batch_file(args: argparse.Namespace, work_dir: Path) -> str:
    """Return the content of the batch script, a bash script with sbatch options at the top."""
    for path in (work_dir, Path.cwd()):
        if not str(path).isprintable():
            raise ConfigError(
                f"folder names in a batch script must not contain line breaks or control characters; "
                f"rename {str(path)!r}"
            )
    check_secrets(args.overrides, "batch script")
    argv = command_args(args, command="train", work_dir=str(work_dir), launcher="slurm", resume=True)
    srun = ["srun", "--kill-on-bad-exit=1"]
    if args.cpus_per_task:
        srun.append(f"--cpus-per-task={args.cpus_per_task}")  # srun does not inherit this option from the job
    command = shlex.join([*srun, sys.executable, "-m", "slipstream", *argv])
    options = "\n".join(f"#SBATCH {option}" for option in _options(args, work_dir))
    return _TEMPLATE.format(
        file=shlex.quote(str(work_dir / _FILE)),
        options=options,
        requeue=_REQUEUE if args.requeue else "",
        command=f"{command} &\n{_WAIT}" if args.requeue else command,
    )


_TEMPLATE = """\
#!/bin/bash
# Written by `slipstream submit`. You can edit this file and submit it again: sbatch {file}
# Each run resumes from the last checkpoint in its --work-dir, or starts from scratch if there is none.
{options}

set -eu

# Each process uses the cores that Slurm assigns to its task.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
{requeue}
# Run one process per task. If any process fails, srun terminates all of them.
{command}
"""

_REQUEUE = """
# Two minutes before the time limit, Slurm sends USR1 to this script. The training processes then save their state and
# exit with status 75. If they are still running after 90 seconds, they are killed. In both cases, the job is requeued.
requeue=
stop() {
    requeue=1
    scancel --signal=USR1 "$SLURM_JOB_ID" || true
    (sleep 90; scancel --signal=KILL "$SLURM_JOB_ID") &
}
trap stop USR1
"""

_WAIT = """\
run=$!
status=0
wait "$run" || status=$?
if [ "$requeue" ]; then # the signal interrupted `wait`, but not the training processes
    status=0
    wait "$run" || status=$?
    if [ "$status" -eq 75 ] || [ "$status" -gt 128 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$status"\
"""


def _options(args: argparse.Namespace, work_dir: Path) -> list[str]:
    values = {
        "job-name": args.job_name or Path(args.config).stem,
        "partition": args.partition,
        "account": args.account,
        "qos": args.qos,
        "time": args.time,
        "nodes": args.nodes,
        "gpus-per-node": args.gpus_per_node,
        "ntasks-per-node": tasks_per_node(args),
        "cpus-per-task": args.cpus_per_task,
        "mem": args.mem,
        "chdir": Path.cwd(),
        "output": f"{str(work_dir).replace('%', '%%')}/slurm-%j.log",
        "open-mode": "append",  # a requeued job appends to its log
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    if args.requeue:
        options += ["--requeue", "--signal=B:USR1@120"]
    return options + [option if option.startswith("-") else f"--{option}" for option in args.sbatch]


def _start_description(work_dir: Path) -> str:
    from slipstream.checkpoint import find_latest_checkpoint

    latest = find_latest_checkpoint(work_dir)
    return f"will resume from {latest}" if latest else "will start from scratch"


def _sbatch(path: Path) -> str:
    try:
        result = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise DistributedError(
            f"sbatch not found on this machine; submit {path} on a node of the Slurm cluster"
        ) from None
    except subprocess.CalledProcessError as error:
        raise DistributedError(f"sbatch rejected {path}: {' '.join(error.stderr.split())}") from None
    return result.stdout.strip().partition(";")[0]  # JOB or JOB;CLUSTER
