"""Run Python commands in forks of a server that has imported torch and its compiler, which takes seconds.

The server imports no other package, so a command still fails if Slipstream uses a module without importing it.
"""

import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_READ_BY_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "LD_", "ASCEND")
"""Prefixes of environment variables that the interpreter and the import of torch read."""


def _read_by_import(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(_READ_BY_IMPORT)}
    found.pop("PYTHONPATH", None)  # the forked process adds these folders to `sys.path`
    return found


class ForkedPython:
    """Runs `python ARGUMENTS` like `subprocess.run(capture_output=True, text=True)`, one command at a time."""

    def __init__(self) -> None:
        self._variables = _read_by_import(os.environ)
        self._socket, other = socket.socketpair()
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            self._server = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)

    def run(
        self,
        *arguments: str,
        cwd: str,
        timeout: float,
        environ: Mapping[str, str] = os.environ,
        forked: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command: `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`.

        A new interpreter runs the command if `forked` is False, if the command has another form, or if an environment
        variable that the import of torch may read differs from its value in the server.
        """
        options = arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")
        if not forked or options or _read_by_import(environ) != self._variables:
            command = [sys.executable, *arguments]
            return subprocess.run(
                command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout
            )
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = json.dumps({"arguments": arguments, "cwd": os.fspath(cwd), "environ": dict(environ)})
            size = len(request.encode()).to_bytes(8)
            socket.send_fds(self._socket, [size], [out.fileno(), err.fileno()])
            self._socket.sendall(request.encode())
            child = self._number()
            self._socket.settimeout(timeout)
            try:
                status = self._number()
            except TimeoutError as error:
                os.kill(child, signal.SIGKILL)
                self._socket.settimeout(None)
                self._number()
                raise subprocess.TimeoutExpired(arguments, timeout) from error
            self._socket.settimeout(None)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
            return subprocess.CompletedProcess(arguments, status, *texts)

    def _number(self) -> int:
        """Read the process id or the exit status of a command."""
        return struct.unpack("q", self._socket.recv(8, socket.MSG_WAITALL))[0]

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._server.wait(30)


def _serve(number: int) -> "tuple[dict[str, object], list[int]] | None":
    """Fork for each request. In the child process, return the request and its output files.

    In the server, return None when the client has closed the connection.
    """
    connection = socket.socket(fileno=number)
    while True:
        size, files, _, _ = socket.recv_fds(connection, 8, 2)
        if not size:
            return None
        request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
        child = os.fork()
        if child == 0:
            connection.close()
            return json.loads(request), files
        for file in files:
            os.close(file)
        connection.sendall(struct.pack("q", child))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(struct.pack("q", status))


def _become(request: "dict[str, object]", files: "list[int]") -> None:
    """Run the command as the main program of this process."""
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kind, *rest = request["arguments"]
    if kind == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        scope = globals()
        code = compile(rest[0], "<string>", "exec")
        for name in scope.keys() - {"__name__", "__builtins__"}:
            del scope[name]
        exec(code, scope)
    else:
        sys.path[0], sys.argv = str(Path(kind).resolve().parent), [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401

    if (_request := _serve(int(sys.argv[1]))) is not None:
        _become(*_request)
