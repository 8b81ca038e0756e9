"""A child process compiles the step while the parent trains eagerly."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.speed.accelerate import accelerate
from slipstream.step import background
from slipstream.step.background import BackgroundCompiler, can_fork

needs_fork = pytest.mark.skipif(not can_fork("cpu"), reason="requires fork on Linux")
COMPILE = dict(scope="step", backend="aot_eager", cache=False)


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def runs(pid):
    """Return whether the process is running. A zombie is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_ended(pid):
    """Return whether a child process has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ---- the child process ------------------------------------------------------------------------------------


@needs_fork
def test_work_runs_in_another_process_at_low_priority(tmp_path):
    compiler, mine = BackgroundCompiler(), [1]
    mine_threads, ours = torch.get_num_threads(), os.nice(0)

    def work():
        mine.append(2)
        total = torch.ones(2000, 2000).sum()  # large enough for several threads
        text = f"{os.getpid()} {os.nice(0)} {torch.get_num_threads()} {total:.0f}"
        (tmp_path / "found").write_text(text)

    compiler.start(work)
    assert compiler.started
    wait_for(compiler.done)
    assert not compiler.started
    pid, nice, threads, total = (tmp_path / "found").read_text().split()
    assert int(pid) != os.getpid()
    assert int(nice) == min(19, ours + background._NICE)
    # Inductor's cache key includes the number of threads, so the child must use the same number as this process.
    assert int(threads) == mine_threads
    assert total == "4000000"
    assert mine == [1]


@needs_fork
@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_error_ends_only_the_child_process(capfd, error):
    compiler = BackgroundCompiler()

    def work():
        print("working", flush=True)
        raise error

    compiler.start(work)
    wait_for(compiler.done)
    assert capfd.readouterr() == ("", "")


@needs_fork
def test_finished_work_leaves_no_process(tmp_path):
    compiler = BackgroundCompiler()

    def work():
        with subprocess.Popen(["sleep", "60"]) as child:
            (tmp_path / "new").write_text(f"{os.getpid()} {child.pid}")
            (tmp_path / "new").rename(tmp_path / "pids")

    compiler.start(work)
    wait_for((tmp_path / "pids").exists)
    pids = (tmp_path / "pids").read_text().split()
    assert all(map(runs, pids))
    compiler.stop()
    wait_for(lambda: not any(map(runs, pids)))
    assert compiler.done()
    compiler.stop()  # a second call is allowed


@needs_fork
def test_work_ends_with_the_parent_process(tmp_path):
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from slipstream.step.background import BackgroundCompiler\n"
        "def work():\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "compiler = BackgroundCompiler()\n"
        "compiler.start(work)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pid = (tmp_path / "pid").read_text()
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not runs(pid))


@needs_fork
def test_child_does_not_affect_the_files_sockets_and_signals_of_the_parent(tmp_path, monkeypatch):
    """The child flushes no buffered text, keeps no files open and runs no signal handlers."""
    compiler, handled = BackgroundCompiler(), tmp_path / "handled"
    printed = (tmp_path / "printed").open("w")
    printed.write("once")
    monkeypatch.setattr(sys, "stdout", printed)
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.open("a").write("x"))
    reading, writing = os.pipe()
    server = socket.create_server(("127.0.0.1", 0))
    try:
        compiler.start(lambda: ((tmp_path / "began").touch(), time.sleep(60)))
        wait_for((tmp_path / "began").exists)
        os.close(writing)
        assert os.read(reading, 1) == b""  # end of file, because no process has the write end open
        port = server.getsockname()[1]
        server.close()
        socket.create_server(("127.0.0.1", port)).close()
        os.kill(compiler._pid, signal.SIGUSR1)
        time.sleep(0.2)
        assert not handled.exists()
        assert not compiler.done()
    finally:
        compiler.stop()
        signal.signal(signal.SIGUSR1, before)
        os.close(reading)
        server.close()
        printed.close()
    assert (tmp_path / "printed").read_text() == "once"


@needs_fork
def test_work_ends_after_the_timeout(monkeypatch):
    monkeypatch.setattr(background, "DEFAULT_LIMIT", 0.2)
    compiler = BackgroundCompiler()
    compiler.start(lambda: time.sleep(60))
    assert not compiler.done()
    assert not compiler.exceeded
    time.sleep(0.3)
    assert compiler.done()
    assert compiler.exceeded


@needs_fork
def test_start_can_wait_until_the_work_or_its_time_limit_ends():
    compiler = BackgroundCompiler(limit=30, wait=True)
    compiler.start(lambda: time.sleep(0.2))
    assert not compiler.started
    assert compiler.seconds >= 0.2
    assert not compiler.exceeded
    compiler = BackgroundCompiler(limit=0.2, wait=True)
    compiler.start(lambda: time.sleep(60))
    assert compiler.exceeded
    compiler.limit = 30  # a large process takes more than 0.2 s to fork on a busy machine
    compiler.start(lambda: None)
    assert not compiler.exceeded


def test_accelerator_is_not_used_in_a_forked_process():
    assert not can_fork("cuda")
    assert not can_fork("npu")


# ---- the step ---------------------------------------------------------------------------------------------


class After:
    """A mock compiler that finishes after `asked` calls to `done`."""

    seconds, exceeded = 0.0, False

    def __init__(self, asked):
        self.asked, self.left, self.began, self.stopped = asked, 0, 0, 0

    def start(self, work):
        self.left, self.began = self.asked, self.began + 1

    def done(self):
        self.left -= 1
        return self.left < 0

    def stop(self):
        self.stopped += 1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(number, size=12):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def by_hand(batches, window=1):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(batches, 1):
        (F.cross_entropy(model(x), y) / window).backward()
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def step_of(model, asked=4, dynamic=None, **speed):
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = dict(COMPILE, dynamic=dynamic)
    step = accelerate(model, optimizer, F.cross_entropy, speed=dict(speed, compile=how))
    step._step.background = After(asked)
    said = []
    step._step.info = said.append
    return step, said


def graphs_in(step, batches):
    """Run the step on each batch. Return, for each batch, whether the graph was used."""
    found, run = [], step._step.eager.train

    def train(inputs, **kwargs):
        found[-1] = False
        return run(inputs, **kwargs)

    step._step.eager.train = train
    for inputs in batches:
        found.append(True)
        step(inputs)
    return found


def test_steps_run_eagerly_until_the_graph_is_compiled():
    batches = [batch(number) for number in range(14)]
    model = net()
    step, said = step_of(model)
    # The first batch determines the trained parameters, five run during the compilation, and one verifies the graph.
    assert graphs_in(step, batches) == [False] * 7 + [True] * 7
    assert step.compiled_scope == "step"
    assert len(said) == 1
    assert "from batch 8 on" in said[0]
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-12, atol=1e-13)


def test_batches_inside_and_at_the_end_of_a_window_use_two_graphs():
    batches = [batch(number) for number in range(24)]
    model = net()
    step, _ = step_of(model, asked=3, accumulate=2)
    found = graphs_in(step, batches)
    assert not any(found[:6])
    assert all(found[-4:])
    assert step._step.background.began == 2
    torch.testing.assert_close(model.state_dict(), by_hand(batches, 2), rtol=1e-12, atol=1e-13)


def test_first_shape_still_uses_its_graph_while_a_new_shape_is_compiled():
    batches = [batch(number, 12 if number < 12 or number % 2 else 9) for number in range(60)]
    model = net()
    step, _ = step_of(model)
    found = graphs_in(step, batches)
    first = [used for used, (x, _) in zip(found, batches, strict=True) if len(x) == 12]
    assert all(first[8:]), first
    assert all(found[-6:])
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dynamic", [None, True])
def test_batch_sizes_that_never_repeat_use_a_single_graph(dynamic):
    sizes = [12, 12, 12, *range(16, 76)]
    batches = [batch(number, size) for number, size in enumerate(sizes)]
    model = net()
    step, _ = step_of(model, asked=2, dynamic=dynamic)
    found = graphs_in(step, batches)
    assert sum(found) > len(found) / 2
    assert step._step.background.began <= 3
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-12, atol=1e-13)


@needs_fork
def test_child_does_not_change_weights_in_shared_memory():
    """This also holds if a verified graph with dynamic shapes could run on the child's batch and update the weights."""

    class Count(nn.Module):
        n = 0

        def forward(self, x):
            self.n += 1
            return x

    sizes = [12] * 6 + [20, 12] * 14
    batches = [batch(number, size) for number, size in enumerate(sizes)]
    model = nn.Sequential(*net(), Count()).share_memory()
    step, _ = step_of(model, asked=0, dynamic=True)
    step._step.background = BackgroundCompiler()
    for inputs in batches:
        step(inputs)
        compiler = step._step.background
        wait_for(lambda compiler=compiler: compiler._pid is None or has_ended(compiler._pid), 60)
    assert step._step._step.verified
    expected = by_hand(batches)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=1e-12, atol=1e-13)


def test_change_during_the_compilation_restarts_the_compilation():
    model = net()
    step, _ = step_of(model, asked=6)
    batches = [batch(number) for number in range(20)]
    found = graphs_in(step, batches[:4])
    model[0].weight.requires_grad_(False)
    found += graphs_in(step, batches[4:])
    assert step._step.background.began == 2
    assert step._step.background.stopped >= 1
    assert found[-1]


def test_paused_compilation_restarts():
    step, _ = step_of(net(), asked=3)
    graphs_in(step, [batch(number) for number in range(3)])
    assert step._step.background.began == 1
    step._step.pause()
    found = graphs_in(step, [batch(number) for number in range(10)])
    assert step._step.background.began == 2
    assert found[-1]


def test_user_errors_are_raised_during_compilation():
    step, _ = step_of(net(), asked=50)
    graphs_in(step, [batch(number) for number in range(3)])
    with pytest.raises(IndexError):
        step((batch(0)[0], torch.full((12,), 7)))
    assert step.compiled_scope == "step"


class TooSlow(After):
    """A mock compiler whose compilations exceed the time limit, starting with compilation number `first`."""

    limit = 90.0

    def __init__(self, first):
        super().__init__(2)
        self.first = first

    @property
    def exceeded(self):
        return self.began >= self.first


def test_step_that_exceeds_its_time_limit_falls_back_to_the_model():
    batches = [batch(number) for number in range(12)]
    model, warned = net(), []
    step, _ = step_of(model)
    step._step.background = TooSlow(1)
    recover = step._step.recover
    step._step.recover = lambda error, problem: warned.append(str(error)) or recover(error, problem)
    assert not any(graphs_in(step, batches))
    assert warned == ["its compilation takes longer than compile.budget (90 s)"]
    assert step.compiled_scope == "model"
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-12, atol=1e-13)


def test_step_with_a_gradient_penalty_that_exceeds_its_time_limit_runs_eagerly(caplog):
    def penalized(model, batch):
        x = batch[0].clone().requires_grad_()
        scores = model(x)
        (grads,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + grads.square().mean()

    torch._dynamo.reset()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = accelerate(model, optimizer, compute_loss=penalized, speed=dict(compile=COMPILE))
    step._step.background = TooSlow(1)
    assert not any(graphs_in(step, [batch(number) for number in range(8)]))
    assert step.compiled_scope is None
    assert "because the loss differentiates the model's gradients" in caplog.text


def test_first_graph_is_kept_if_another_shape_exceeds_the_time_limit():
    batches = [batch(number, 12 if number < 12 or number % 2 else 9) for number in range(60)]
    model = net()
    step, said = step_of(model)
    step._step.background = TooSlow(2)
    found = graphs_in(step, batches)
    first = [used for used, (x, _) in zip(found, batches, strict=True) if len(x) == 12]
    others = [used for used, (x, _) in zip(found, batches, strict=True) if len(x) != 12]
    assert all(first[6:])
    assert not any(others)
    assert said[-1].startswith("Batches that need another graph run eagerly")
    assert step._step.background.began == 2
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-12, atol=1e-13)


def test_step_is_compiled_in_this_process_if_fork_fails():
    step, _ = step_of(net())

    class NoMemory(After):
        def start(self, work):
            raise OSError("out of memory")

    step._step.background = NoMemory(0)
    found = graphs_in(step, [batch(number) for number in range(6)])
    assert found == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("how", "used"),
    [
        (dict(scope="step"), can_fork("cpu")),
        (dict(scope="step", wait=True), False),
        (dict(scope="step", wait=True, budget="1m"), can_fork("cpu")),
        (dict(scope="step", backend="aot_eager"), False),
    ],
)
def test_only_inductor_compiles_in_the_background(how, used):
    model = net()
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, dict(compile=how))
    assert (step._step.background is not None) == used
    step.close()


@pytest.fixture
def _changed_settings():
    """Change settings that the child must share with this process, because they are part of the cache key.

    The context restores them after the test. monkeypatch would delete them, and later compilations would fail.
    """
    with torch._inductor.config.patch(fx_graph_remote_cache=False, max_fusion_size=32):
        yield


@needs_fork
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor requires a C++ compiler")
@pytest.mark.usefixtures("_changed_settings")
def test_compiled_code_comes_from_the_child_process(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "_NICE", 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Compile a function first, because this starts threads that do not exist in the forked child.
    torch._dynamo.reset()
    torch.compile(F.gelu)(torch.randn(100, 7))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batches = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = dict(scope="step", cache=False)
    step = accelerate(model, optimizer, F.cross_entropy, speed=dict(compile=how))
    end, after = time.monotonic() + 300, 0
    while after < 5:
        assert time.monotonic() < end
        time.sleep(0.05)  # leave the cores to the child process
        batches.append(batch(len(batches)))
        step(batches[-1])
        captured = step._step._step
        after += captured is not None and bool(captured.verified)
    assert len(batches) > 10
    found = torch._dynamo.utils.counters
    assert found["inductor"]["fxgraph_cache_miss"] == 0
    assert found["aot_autograd"]["autograd_cache_hit"] + found["inductor"]["fxgraph_cache_hit"] > 0
    torch.testing.assert_close(model.state_dict(), by_hand(batches), rtol=1e-9, atol=1e-12)
