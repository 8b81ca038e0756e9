"""A compiled model computes what the eager one does, and one that cannot be compiled runs eagerly."""

import copy
import io
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from slipstream.errors import ConfigError, DataError, UnknownNameError
from slipstream.model import BaseModel
from slipstream.optim import AmpOptimWrapper, OptimWrapper
from slipstream.speed import CompileOptions, compile_model, read_compile


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # its limit on recompilations counts over all tests
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(BaseModel):
    def __init__(self, broken_graph=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.last = nn.Linear(8, 2)
        self.broken_graph = broken_graph
        self.breaks = 0

    def forward(self, x, y, mode="tensor"):
        hidden = self.first(x)
        if self.broken_graph:
            torch._dynamo.graph_break()
        out = self.last(hidden)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(out, y)}
        return {"preds": out, "targets": y} if mode == "predict" else out


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x = torch.randn(8, 3, generator=generator)
        made.append((x, x[:, :2].argmax(1)))
    return made


def run(model, data, amp=False):
    """Train and validate in turn, as a Runner does; return losses and scores."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim = AmpOptimWrapper(optimizer=optimizer) if amp else OptimWrapper(optimizer)
    losses, scores = [], []
    for number, batch in enumerate(data):
        losses.append(model.train_step(batch, optim)["loss"])
        if number % 2:
            model.eval()
            scores.append(model.val_step(batch)["preds"])
            model.train()
    return losses, scores


def assert_as_eager(model, eager, amp=False, tolerance=1e-6):
    data = batches()
    for ours, theirs in zip(run(model, data, amp), run(eager, data, amp), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert model.state_dict().keys() == eager.state_dict().keys()
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=tolerance, atol=tolerance)


class Backend:
    """A callable backend that runs the graphs as they are and counts them."""

    def __init__(self, fail_at=None):
        self.graphs, self.fail_at, self.calls = 0, fail_at, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        if self.graphs == self.fail_at:
            raise RuntimeError("no such instruction")

        def call(*args):
            self.calls += 1
            return graph(*args)

        return call


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("broken_graph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "callable"])
def test_training_and_validation_run_compiled_with_the_numbers_of_eager(backend, broken_graph, amp):
    model, warnings = Net(broken_graph), []
    eager = copy.deepcopy(model)
    counting = Backend()
    compile_model(model, CompileOptions(counting if backend == "callable" else backend), warnings.append)
    assert_as_eager(model, eager, amp)
    assert warnings == []
    if backend == "callable":
        parts = 2 if broken_graph else 1
        assert counting.graphs == 2 * parts  # for training, and for validation
        assert counting.calls == (6 + 3) * parts


def test_parameters_keep_their_names_and_identity():
    model = Net()
    before = {name: id(p) for name, p in model.named_parameters()}
    compile_model(model, CompileOptions("eager"), pytest.fail)
    model.train_step(batches(1)[0], OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    Net().load_state_dict(model.state_dict())


def test_a_compiled_model_can_be_copied_and_pickled():
    model = Net()
    compile_model(model, CompileOptions("eager"), pytest.fail)
    x, y = batches(1)[0]
    model.eval()
    expected = model(x, y)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        torch.testing.assert_close(other(x, y), expected)
        with torch.no_grad():
            other.last.bias.add_(1)  # a copy computes with its own weights
        torch.testing.assert_close(other(x, y), expected + 1)
    torch.testing.assert_close(model(x, y), expected)


def test_a_compiled_model_that_was_copied_still_runs_compiled():
    model, counting = Net(), Backend()
    compile_model(model, CompileOptions(counting), pytest.fail)
    copy.deepcopy(model)
    model(*batches(1)[0])
    assert counting.calls == 1


def test_buffers_are_set_aside_in_the_first_calls_only(monkeypatch):
    model, counted = Net(), []
    compile_model(model, CompileOptions("eager"), pytest.fail)
    buffers = nn.Module.buffers
    monkeypatch.setattr(Net, "buffers", lambda self: counted.append(1) or buffers(self))
    run(model, batches())
    assert len(counted) == 2  # one of training, one of validation


# ---- what cannot be compiled -------------------------------------------------------------------------


def raises(graph, inputs):
    raise RuntimeError("no such instruction")


def raises_in_backward(graph, inputs):
    raise RuntimeError("no such instruction")


BACKWARD = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=raises_in_backward)


@pytest.mark.parametrize(
    ("how", "broken_graph", "reason"),
    [
        (CompileOptions(raises), False, "no such instruction"),
        (CompileOptions(Backend(fail_at=2)), True, "no such instruction"),  # after BatchNorm has run
        (CompileOptions(BACKWARD), False, "no such instruction"),
        (CompileOptions(BACKWARD), True, "no such instruction"),
        (CompileOptions("eager", fullgraph=True), True, "graph_break"),
        (CompileOptions(mode="fastest"), False, "fastest"),
        (CompileOptions("no_such_backend"), False, "no_such_backend"),
        (CompileOptions(options={"no_such_option": 1}), False, "no_such_option"),
        (CompileOptions(mode="default", options={"max_autotune": True}), False, "mode"),
    ],
)
def test_what_cannot_be_compiled_runs_eagerly_after_one_warning_with_the_reason(how, broken_graph, reason):
    if isinstance(how.backend, Backend):
        how.backend.graphs = 0
    model, warnings = Net(broken_graph), []
    eager = copy.deepcopy(model)
    compile_model(model, how, warnings.append)
    assert_as_eager(model, eager, tolerance=0)  # BatchNorm's buffers and its count among it
    assert len(warnings) == 1
    assert warnings[0].startswith("Net cannot be compiled (")
    assert reason in warnings[0]
    assert "it runs eagerly" in warnings[0]


def test_failing_only_in_validation_leaves_training_as_it_was():
    model, warnings = Net(), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(Backend(fail_at=2)), warnings.append)
    assert_as_eager(model, eager)
    assert len(warnings) == 1


def test_too_many_shapes_for_one_graph_end_in_eager_rather_than_in_a_crash():
    model, warnings = Net(), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions("eager", fullgraph=True, dynamic=False), warnings.append)
    for size in range(2, 14):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x, None), eager(x, None))
    assert len(warnings) == 1
    assert torch.equal(model.first[1].num_batches_tracked, torch.tensor(12))


@pytest.mark.parametrize("how", [CompileOptions("eager"), CompileOptions("eager", fullgraph=True)])
def test_the_models_own_errors_come_through(how):
    model = Net()
    compile_model(model, how, lambda message: None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 7), None)
    with pytest.raises(DataError, match="forward takes"):
        model.val_step({"image": torch.randn(4, 3)})


# ---- reading the configuration -----------------------------------------------------------------------


def test_compile_is_read_from_what_configurations_say():
    assert read_compile(None) is None
    assert read_compile(False) is None
    assert read_compile(True) == CompileOptions()
    assert read_compile({}) == CompileOptions()
    assert read_compile({"mode": "reduce-overhead"}).mode == "reduce-overhead"
    assert read_compile({"backend": raises}).backend is raises
    assert read_compile(how := CompileOptions("eager")) is how


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"mod": "default"}, UnknownNameError, "compile.mod: no such option; did you mean 'mode'?"),
        ({"fullgraph": "yes"}, ConfigError, "compile.fullgraph: expected bool, not 'yes'"),
        ({"mode": 3}, ConfigError, "compile.mode: expected str or None, not 3"),
        ("inductor", ConfigError, "compile: expected a dict of CompileOptions, not 'inductor'"),
    ],
)
def test_a_mistake_in_compile_is_named(value, error, message):
    with pytest.raises(error) as caught:
        read_compile(value)
    assert str(caught.value) == message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor_trains_with_the_numbers_of_eager():
    model, warnings = Net(), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(), warnings.append)
    data = batches(5)
    ours, theirs = run(model, data), run(eager, data)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert warnings == []
