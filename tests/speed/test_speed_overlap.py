"""Tests of the graph pass that overlaps gradient all-reduces with the backward pass."""

import pytest
import torch
from torch import fx

from slipstream.speed.inductor import SendEarly

AFTER = "the bucket is sent after the next gradient is computed"


def step(graph, layers):
    """Add to the graph a backward pass through `layers` layers, followed by one all-reduce for every two layers.

    Return the node that computes the gradient of the input.
    """
    aten, comm = torch.ops.aten, torch.ops._c10d_functional
    signal, grads = graph.placeholder("signal"), []
    for _ in range(layers):
        grads.append(graph.call_function(aten.mm.default, (signal, signal)))
        signal = graph.call_function(aten.tanh.default, (signal,))
    sums = []
    for first in range(0, layers, 2):
        parts = [graph.call_function(aten.view.default, (g, [-1])) for g in grads[first : first + 2]]
        flat = graph.call_function(aten.cat.default, (parts,))
        sent = graph.call_function(comm.all_reduce.default, (flat, "sum", "0"))
        sums.append(graph.call_function(comm.wait_tensor.default, (sent,)))
    graph.output([graph.call_function(aten.neg.default, (s,)) for s in sums])
    return signal


@pytest.fixture
def graph():
    graph = fx.Graph()
    step(graph, 6)
    return graph


def names(graph, target):
    return [i for i, node in enumerate(graph.nodes) if node.target is target]


def test_buckets_are_sent_before_the_gradients_of_the_next_layer(graph):
    kept = [
        n.name for n in graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.tanh.default)
    ]
    SendEarly()(graph)
    graph.lint()  # check that each input precedes its users
    gradients = names(graph, torch.ops.aten.mm.default)
    sent = names(graph, torch.ops._c10d_functional.all_reduce.default)
    waits = names(graph, torch.ops._c10d_functional.wait_tensor.default)
    assert len(sent) == len(waits) == 3
    for number, position in enumerate(sent[:-1]):
        assert position < gradients[2 * number + 2], AFTER
    assert min(waits) > max(sent)
    after = [
        n.name for n in graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.tanh.default)
    ]
    assert after == kept
