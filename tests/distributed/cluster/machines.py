"""Machines for tests: this machine, and two virtual machines built from Linux namespaces.

The virtual machines have separate host names (n1, n2), addresses, hosts files and process ids. A veth pair connects
them, and they share the file system. They do not change this machine. Both machines and all their processes end when
the pipe that they read from closes, even if the tests are killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}

_UNSHARE = "unshare --net --uts --mount --pid --fork --mount-proc --propagation private"
# The first process of n1 starts n2 and creates the veth pair. $1 is the hosts file. The first process of a machine
# adopts its orphans. Unlike sleep or cat, bash also reaps them.
_BOOT = rf"""
set -eu
mount --bind "$1" /etc/hosts
# No name server can be reached; do not wait for one.
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
hostname n1
ip link set lo up
{_UNSHARE} bash -c 'hostname n2; while read -r; do :; done' <&0 &
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do kill -0 $!; sleep 0.02; done
ip link add name eth0 type veth peer name eth0 netns $!
ip addr add {ADDRESSES["n1"]}/24 dev eth0
ip link set eth0 up
nsenter --target $! --net sh -ec 'ip link set lo up; ip addr add {ADDRESSES["n2"]}/24 dev eth0; ip link set eth0 up'
until [ -n "$(cat /proc/$!/task/$!/children)" ]; do kill -0 $!; sleep 0.02; done
echo ready
while read -r; do :; done
"""


class NoMachines(Exception):  # noqa: N818  a reason to skip, not an error
    """The user is not allowed to create namespaces, or a program is missing."""


@dataclass
class Run:
    """A running command and its output, including stderr."""

    command: str
    process: subprocess.Popen[bytes]
    file: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait(self, timeout: float = 150) -> Run:
        """Wait for the command to end. If it runs for more than `timeout` seconds, terminate it and fail the test."""
        try:
            self.process.wait(max(0.0, self.began + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(
                f"{self.command}\nwas still running after {timeout} s:\n{self.output}"
            ) from None
        self.seconds = time.monotonic() - self.began
        return self

    def end(self) -> None:
        """Terminate the command if it is running, first with SIGTERM, which launchers forward to their processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(15)
                except subprocess.TimeoutExpired:
                    continue

    def succeeded(self) -> Run:
        """Check that the command succeeded. Return the run."""
        status = self.process.returncode
        assert status == 0, f"{self.command}\nexited with {status}:\n{self.output}"
        return self

    def failed(self) -> Run:
        """Check that the command failed. Return the run."""
        assert self.process.returncode != 0, f"{self.command}\nshould have failed:\n{self.output}"
        return self


@dataclass(frozen=True)
class Machine:
    """A machine that runs commands.

    `enter` is the prefix of each command. `environ` contains additional environment variables.
    """

    enter: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def running(self, command: str, folder: Path, **environ: str) -> Iterator[Run]:
        """Start the shell command in `folder`. Terminate it at the end of the block if it is still running."""
        number = sum(1 for _ in folder.glob("output*.txt"))
        file = folder / f"output{number}.txt"
        with file.open("wb") as out:
            process = subprocess.Popen(
                # bash changes to the folder because `enter` changes the working directory.
                [*self.enter, "bash", "-euo", "pipefail", "-c", f'cd "$0"\n{command}', str(folder)],
                env=environment() | dict(self.environ) | environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run = Run(command, process, file)
        try:
            yield run
        finally:
            run.end()

    def run(self, command: str, folder: Path, timeout: float = 150, **environ: str) -> Run:
        """Run the shell command in `folder` and wait for it to end."""
        with self.running(command, folder, **environ) as run:
            return run.wait(timeout)


def this_machine() -> Machine:
    """Return this machine. torchrun uses a free port by default, because another program may be using port 29500."""
    return Machine(environ={"PET_MASTER_PORT": str(free_port())})


@contextmanager
def two_machines(folder: Path) -> Iterator[dict[str, Machine]]:
    """Create the machines n1 and n2. Terminate them and all their processes at the end of the block.

    Raises:
        NoMachines: the user is not allowed to create namespaces, or a program is missing.
    """
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items())
    )
    user = [] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps"]
    words = _UNSHARE.split()
    try:
        holder = subprocess.Popen(
            [words[0], *user, *words[1:], "bash", "-c", _BOOT, "boot", str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise NoMachines(f"requires unshare from util-linux: {error}") from None
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != b"ready\n":
            holder.stdin.close()
            raise NoMachines(
                f"requires permission to create network namespaces: {holder.stderr.read().decode()!r}"
            )
        first = _only_child(holder.pid)
        second = _only_child(_only_child(first))
        yield {"n1": _machine(first, bool(user)), "n2": _machine(second, bool(user))}
    finally:
        holder.stdin.close()
        try:
            holder.wait(15)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()
        holder.stderr.close()


def _machine(pid: int, mapped: bool) -> Machine:
    user = ("--user", "--preserve-credentials") if mapped else ()
    return Machine(("nsenter", "--target", str(pid), *user, "--net", "--uts", "--mount", "--pid"))


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def environment() -> dict[str, str]:
    """Return the environment for a command: that of this process, without the variables that a launcher sets.

    PATH starts with the folder of this interpreter, and OpenMP uses one thread.
    """
    foreign = re.compile(
        r"(SLURM|SBATCH|SRUN|OMPI|PMI|PMIX|PET|TORCHELASTIC|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
    )
    environ = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    path = f"{Path(sys.executable).parent}:{environ['PATH']}:/usr/sbin:/sbin"
    return environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
