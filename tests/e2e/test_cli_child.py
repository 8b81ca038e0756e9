"""Tests of a command's child processes: they end with the command, and the reason for a failure is returned."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream import process_tree
from slipstream.cli.child import interrupt_on_sigterm, run_child

WITH_CHILD = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({path!r}, "w").write(str(inner.pid))
time.sleep(60)
"""


def ends(pid):
    """Wait at most 20 seconds for a process to exit. Return whether it has exited."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(400):
        # The state is Z if the process has exited but its parent has not waited for it.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, "exited with status 3"),
        ("raise RuntimeError('two\\nlines')", 1, "lines"),
        ("import sys; sys.exit('slipstream: error: lr: must be positive')", 1, "lr: must be positive"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "killed by SIGKILL, possibly because the machine ran out of memory",
        ),
    ],
)
def test_status_and_reason_of_an_ended_process_are_returned(script, status, reason, capfd):
    done = run_child(["-c", script])
    assert (done.status, done.reason) == (status, reason)


def test_standard_error_is_copied_unless_quiet(capsys):
    run_child(["-c", "import sys; print('seen', file=sys.stderr)"])
    assert capsys.readouterr().err == "seen\n"
    run_child(["-c", "import sys; print('seen', file=sys.stderr)"], quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN);"])
def test_timeout_ends_the_process(ignored):
    script = f"import signal, time; {ignored} time.sleep(60)"
    done = run_child(["-c", script], timeout=1.0, grace=0.5, quiet=True)
    assert (done.status != 0, done.reason) == (True, "did not finish within 1 s")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_process_and_its_child_processes(tmp_path, number):
    path = tmp_path / "pid"

    def interrupt():
        while not (path.exists() and path.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    with pytest.raises((KeyboardInterrupt, SystemExit)), interrupt_on_sigterm():
        run_child(["-c", WITH_CHILD.format(path=str(path))], grace=1.0, quiet=True)
    assert ends(int(path.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ignored", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_timeout_ends_processes_with_their_own_session(tmp_path, ignored):
    path = tmp_path / "pid"
    script = WITH_CHILD.format(path=str(path)).replace('(60)"])', '(60)"], start_new_session=True)')
    done = run_child(["-c", ignored + script], timeout=2.0, grace=0.5, quiet=True)
    assert done.reason == "did not finish within 2 s"
    assert ends(int(path.read_text()))


def test_process_that_reuses_an_id_is_not_killed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process_tree.kill({process.pid: "an earlier start time"})
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_process_can_save_its_state_when_it_is_interrupted(tmp_path):
    script = f"""
import time
try:
    open({str(tmp_path / "started")!r}, "w").close()
    time.sleep(60)
except KeyboardInterrupt:
    open({str(tmp_path / "saved")!r}, "w").close()
"""

    def interrupt():
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_child(["-c", script], quiet=True)
    assert (tmp_path / "saved").exists()


def test_sigterm_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with interrupt_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_process_saves_its_state_if_it_ignores_ctrl_c_like_background_jobs(tmp_path):
    script = f"""
import signal, sys, time
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / "saved")!r}, "w").close(), sys.exit(75)))
time.sleep(60)
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start = time.monotonic()
        run_child(["-c", script], timeout=1.0, quiet=True)
        assert time.monotonic() - start < 15  # without the grace period for SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()
