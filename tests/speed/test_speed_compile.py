"""A compiled model matches the eager model, and a model that cannot be compiled runs eagerly."""

import copy
import io
import pickle
import shutil

import pytest
import torch
from compiled_nets import Backend, Net, Tower, assert_as_eager, batches, raises, run
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper
from slipstream.speed.compile import CompileOptions
from slipstream.speed.compile_report import CompileReport
from slipstream.speed.compiled_modules import compile_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # reset torch's count of recompiles, which accumulates across tests
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("broken_graph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "callable"])
def test_compiled_training_and_validation_match_eager(backend, broken_graph, amp):
    model, warnings = Net(broken_graph), []
    eager = copy.deepcopy(model)
    counting = Backend()
    compile_model(model, CompileOptions(counting if backend == "callable" else backend), warnings.append)
    assert_as_eager(model, eager, amp)
    assert warnings == []
    if backend == "callable":
        parts = 2 if broken_graph else 1
        assert counting.graphs == 2 * parts  # one for training, one for validation
        assert counting.calls == (6 + 3) * parts


def test_compiled_model_can_be_copied_and_pickled():
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
            other.last.bias.add_(1)  # the copy uses its own weights
        torch.testing.assert_close(other(x, y), expected + 1)
    torch.testing.assert_close(model(x, y), expected)


# ---- failed compilation ------------------------------------------------------------------------------


def raises_in_backward(graph, inputs):
    raise RuntimeError("no such instruction")


BACKWARD = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=raises_in_backward)


@pytest.mark.parametrize(
    ("how", "broken_graph", "reason"),
    [
        (CompileOptions(raises), False, "no such instruction"),
        (CompileOptions(Backend(fail_at=2)), True, "no such instruction"),  # fails after BatchNorm has run
        (CompileOptions(BACKWARD), False, "no such instruction"),
        (CompileOptions(BACKWARD), True, "no such instruction"),
        (CompileOptions("eager", fullgraph=True), True, "graph_break"),
        (CompileOptions("no_such_backend"), False, "no_such_backend"),
        (CompileOptions(options={"no_such_option": 1}), False, "no_such_option"),
    ],
)
def test_failed_compilation_falls_back_to_eager_with_one_warning(how, broken_graph, reason):
    if isinstance(how.backend, Backend):
        how.backend.graphs = 0
    model, warnings = Net(broken_graph), []
    eager = copy.deepcopy(model)
    compile_model(model, how, warnings.append)
    assert_as_eager(model, eager, tolerance=0)  # includes BatchNorm's buffers
    assert len(warnings) == 1
    assert warnings[0].startswith("Net cannot be compiled (")
    assert reason in warnings[0]
    assert "and runs eagerly" in warnings[0]


# ---- shapes ------------------------------------------------------------------------------------------


class Pixels(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x, y, mode="tensor"):
        out = self.head(self.body(x))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(out, y)}
        return out.argmax(1) if mode == "predict" else out


def train_on_ragged_batches(model, last, sizes):
    """Train for three epochs with batches of 4, 4, 4 and `last` images.

    After each epoch, validate on batches of the given `sizes`.
    """
    generator = torch.Generator().manual_seed(1)

    def batch(*size):
        x = torch.randn(size[0], 3, *size[1:], generator=generator)
        return x, x[:, 0].gt(0).long()

    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    losses, predictions = [], []
    for _ in range(3):
        model.train()
        losses += [model.train_step(batch(n, 8, 8), optim)["loss"] for n in (4, 4, 4, last)]
        model.eval()
        predictions += [model.val_step(batch(*size)) for size in sizes]
    return losses, predictions


SIZES = {
    "several images": [(4, 8, 8), (4, 12, 8), (4, 16, 20), (2, 20, 24)],
    "one image": [(1, 8, 8), (1, 12, 8), (1, 16, 20), (1, 20, 24)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("last", [3, 1])
@pytest.mark.parametrize(("dynamic", "most"), [(None, 5), (True, 4)])
def test_varying_batch_and_image_sizes_require_few_graphs(dynamic, most, last, sizes):
    model, warnings, report = Pixels(), [], CompileReport()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions("eager", dynamic=dynamic), warnings.append)
    ours = train_on_ragged_batches(model, last, sizes)
    lines = report.lines()
    torch.testing.assert_close(ours, train_on_ragged_batches(eager, last, sizes))
    assert len(lines) == 1  # nothing reduced the speed
    assert 2 <= int(lines[0].split()[1]) <= most
    assert warnings == []


def test_models_of_one_class_do_not_share_a_recompile_limit():
    backends = [Backend() for _ in range(10)]
    for size, backend in enumerate(backends, start=2):
        model = nn.Sequential(nn.Linear(size, 3), nn.ReLU())
        compile_model(model, CompileOptions(backend, dynamic=False), pytest.fail)
        model(torch.randn(4, size))
        with torch.no_grad():
            model(torch.randn(4, size))
    assert [backend.graphs for backend in backends] == [2] * 10


# ---- inlining into another graph ---------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["model", "block"])
def test_outer_graph_inlines_the_compiled_model(scope):
    model, counting = Tower([4, 4]), Backend()
    compile_model(model, CompileOptions(counting, scope=scope), pytest.fail)
    x = torch.randn(2, 4)
    expected = model(x)
    made = counting.graphs
    outer = Backend()
    torch.testing.assert_close(torch.compile(model, backend=outer, fullgraph=True)(x), expected)

    @torch.compile(backend=outer, fullgraph=True)
    def doubled(x):
        return 2 * model(x)

    torch.testing.assert_close(doubled(x), 2 * expected)
    assert (outer.graphs, counting.graphs) == (2, made)


# ---- parsing the configuration -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor requires a C++ compiler")
def test_inductor_matches_eager():
    model, warnings = Net(), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(), warnings.append)
    data = batches(5)
    ours, theirs = run(model, data), run(eager, data)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert warnings == []
