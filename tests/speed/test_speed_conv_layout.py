"""Tests of the graph pass that selects the CPU memory layouts of convolutions."""

import copy

import pytest
import torch
import torch._inductor.lowering  # some decompositions require this import
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.speed.compile import CompileOptions
from slipstream.speed.compiled_modules import compile_model
from slipstream.speed.conv_layout import LayOutConvolutions
from slipstream.speed.inductor import inductor_options

ATEN = torch.ops.aten
LAST = torch.channels_last


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + x)


def residual():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual(4), Residual(4)
    )


def pixelwise():
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1, bias=False))


def heavy():
    """Return a network with a convolution whose weight is much larger than the activations."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(32, 32, 3, padding=1),
    )


def various():
    """Return a network with strides, groups, dilation, pooling, a transposed convolution and a reshaped output."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, stride=2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Flatten(),
        nn.Unflatten(1, (4, -1)),
    )


def with_dropout():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))


def traced(net, x):
    """Return the graph of the loss and the gradients, as inductor receives it, and the arguments of the graph."""
    params = {name: p.detach() for name, p in net.named_parameters()}
    buffers = {name: b.clone() for name, b in net.named_buffers()}

    def step(params, buffers, x):
        wanted = {name: p.requires_grad_() for name, p in params.items()}
        loss = functional_call(net, (wanted, buffers), x).square().mean()
        return loss.detach(), *torch.autograd.grad(loss, list(wanted.values()))

    arguments = (params, buffers, x)
    graph = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode="fake")(*arguments)
    return graph, arguments


def results(run, arguments):
    torch.manual_seed(0)
    with torch.no_grad():
        return run(*copy.deepcopy(arguments))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("make", [residual, pixelwise, heavy, various, with_dropout])
def test_losses_and_gradients_match_the_original_graph(make, memory_format):
    torch.manual_seed(0)
    net = make().double().to(memory_format=memory_format)
    module, arguments = traced(net, torch.randn(2, 3, 12, 12, dtype=torch.float64))
    expected = results(module, arguments)
    LayOutConvolutions()(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(results(module, arguments), expected, rtol=1e-10, atol=1e-12)


def convolutions(module):
    return [
        n
        for n in module.graph.nodes
        if n.target in (ATEN.convolution.default, ATEN.convolution_backward.default)
    ]


def operands(node):
    return [a.meta["val"] for a in node.all_input_nodes]


def test_residual_net_is_channels_last_without_copies_of_activations():
    module, _ = traced(residual(), torch.randn(2, 3, 12, 12).to(memory_format=LAST))
    LayOutConvolutions()(module.graph)
    assert len(convolutions(module)) == 10
    assert all(value.is_contiguous(memory_format=LAST) for n in convolutions(module) for value in operands(n))
    clones = module.graph.find_nodes(op="call_function", target=ATEN.clone.default)
    # one copy of each weight for both forward and backward
    assert {n.args[0].op for n in clones} == {"placeholder"}
    assert len(clones) == 5


@pytest.mark.slow
def test_inductor_code_matches_eager_without_transposing_activations():
    torch.manual_seed(0)
    net = nn.Sequential(Residual(8), nn.Conv2d(8, 4, 1)).double()
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64).to(memory_format=LAST)
    module, arguments = traced(net, x)
    expected = results(module, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(module, options=inductor_options("cpu"))
    found, codes = run_and_get_code(results, compiled, arguments)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    code = "\n".join(codes).partition("def call")[2]
    assert "extern_kernels.convolution(" in code
    assert "(512, 1, 64, 8)" in code  # channels-last strides of activations
    assert "(512, 64, 8, 1)" not in code


class WithGraphBreak(nn.Module):
    """Convolutions before and after a graph break, and a second input with a different layout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = residual(), nn.Sequential(nn.Dropout(0.5), Residual(4), pixelwise_of(4))

    def forward(self, x, y):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x + self.first(y))


def pixelwise_of(channels):
    return nn.Sequential(nn.Conv2d(channels, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=3, stride=2))


@pytest.mark.slow
def test_compiled_model_with_layouts_computes_the_gradients_of_the_eager_model(monkeypatch):
    torch._dynamo.reset()
    graphs = []

    call = LayOutConvolutions.__call__

    def lay_out(self, graph):
        graphs.append(graph)
        call(self, graph)

    monkeypatch.setattr(LayOutConvolutions, "__call__", lay_out)
    torch.manual_seed(0)
    eager = WithGraphBreak()
    compiled = copy.deepcopy(eager)
    compile_model(compiled, CompileOptions(scope="model"), pytest.fail)
    x, y = torch.randn(2, 3, 12, 12), torch.randn(2, 3, 12, 12).to(memory_format=LAST)
    with torch._inductor.config.patch(force_disable_caches=True):
        expected, found = trained(eager, x, y), trained(compiled, x, y)
    assert len(graphs) >= 4  # the forward and the backward graph of both parts
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def trained(model, x, y):
    """Return the losses, the gradients and the buffers after two steps, and the outputs in evaluation mode."""
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = model(x, y).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], list(model.buffers()), model.eval()(x, y)
