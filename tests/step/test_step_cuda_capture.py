"""Tests of `CudaCapture` with the real `torch.cuda.graph` and with mocks of the streams and graphs of torch.cuda."""

from threading import Thread

import pytest
import torch

from slipstream.step.cuda_graph import CapturedCalls, CudaCapture

NOT_PERMITTED = "operation not permitted when stream is capturing"


class Stream:
    def wait_stream(self, stream):
        pass


class Cuda:
    """A mock of the current stream, and of the rules for calls to CUDA during a capture."""

    def __init__(self):
        self.default = self.current = Stream()
        self.mode, self.valid, self.replays = None, True, 0

    def call_from_a_thread(self):
        """Call CUDA from a different thread, such as one that pins memory."""
        thread = Thread(target=self.call)
        thread.start()
        thread.join()

    def call(self):
        if self.mode == "global":
            self.valid = False

    def invalidate(self):
        """Call a function that is not permitted during a capture, such as a device synchronization."""
        if self.mode is not None:
            self.valid = False
            raise RuntimeError(NOT_PERMITTED)


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, cuda.current = cuda.current, self.stream

        def __exit__(self, *_):
            cuda.current = self.before

    class Graph:
        def capture_begin(self, *pool, capture_error_mode="global", **_):
            cuda.mode, cuda.valid = capture_error_mode, True

        def capture_end(self):
            cuda.mode = None
            if not cuda.valid:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self):
            cuda.replays += 1

    mocks = dict(Stream=Stream, stream=StreamContext, CUDAGraph=Graph, current_stream=lambda: cuda.current)
    mocks |= dict.fromkeys(("synchronize", "empty_cache", "graph_pool_handle"), lambda: None)
    for name, mock in mocks.items():
        monkeypatch.setattr(torch.cuda, name, mock)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return cuda


def test_other_threads_may_call_cuda_during_a_capture(cuda):
    def run(arguments):
        cuda.call_from_a_thread()
        return arguments[0] + 1

    calls = CapturedCalls(CudaCapture(), pytest.fail)
    for _ in range(5):
        calls(run, [torch.ones(1)])
    assert cuda.replays == 2


def test_stream_is_restored_after_a_failed_capture(cuda):
    streams, said = [], []

    def run(arguments):
        streams.append(cuda.current)
        cuda.invalidate()
        return arguments[0] + 1

    calls = CapturedCalls(CudaCapture(), said.append)
    for _ in range(5):
        assert calls(run, [torch.ones(1)]).item() == 2
        assert cuda.current is cuda.default
    assert cuda.replays == 0
    assert streams[-2:] == [cuda.default] * 2  # the rerun after the failed capture, and the next call
    assert len(said) == 1
