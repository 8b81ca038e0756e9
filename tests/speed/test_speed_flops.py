"""Tests of the operation counts of training steps and of the peak speeds of accelerators."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.checkpoint import get_random_state
from slipstream.speed.activation_checkpointing import ActivationCheckpointingOptions, checkpoint_activations
from slipstream.speed.flops import training_flops, without_data


class Net(nn.Module):
    """A network of two convolutions, BatchNorm, dropout and a linear layer for 3 x 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.Dropout(0.5))
        self.last = nn.Linear(6 * 4 * 4, 5)

    def forward(self, images):
        return self.last(self.block(self.norm(self.first(images))).flatten(1))


def batch(size=2):
    return torch.randn(size, 3, 8, 8), torch.zeros(size, dtype=torch.long)


def loss_of(net, inputs):
    return F.cross_entropy(net(inputs[0]), inputs[1])


def expected(size):
    """Return the expected count: two operations for each product of a weight and an input.

    The backward pass computes two gradients per layer, but no gradient with respect to the input of the first layer.
    """
    first = 2 * size * 4 * 8 * 8 * 3 * 3 * 3
    block = 2 * size * 6 * 4 * 4 * 4 * 3 * 3
    last = 2 * size * 6 * 4 * 4 * 5
    return 2 * first + 3 * (block + last)


@pytest.mark.parametrize("size", [1, 3])
def test_count_equals_the_products_of_each_layer(size):
    assert training_flops(Net(), without_data(batch(size)), loss_of) == expected(size)


def test_counting_changes_neither_the_model_nor_the_random_state():
    net, inputs = Net(), batch()
    loss_of(net, inputs).backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    grads = [param.grad.clone() for param in net.parameters()]
    state = get_random_state()
    training_flops(net, without_data(inputs), loss_of)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True))
    after = get_random_state()
    assert after["python"] == state["python"]
    assert torch.equal(after["torch"], state["torch"])
    assert torch.equal(after["numpy"][1], state["numpy"][1])


def test_recomputed_blocks_are_counted_once():
    net = Net()
    checkpoint_activations(net, ActivationCheckpointingOptions(modules=["block"]))
    assert training_flops(net, without_data(batch()), loss_of) == expected(2)
    loss_of(net, batch()).backward()  # the model is unchanged and still works


class Single(nn.Module):
    """A model that returns the mean of a layer's output as the loss."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        outputs = self.layer(*inputs)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).mean()


def count_of(layer, *inputs):
    return training_flops(Single(layer), without_data(list(inputs)), lambda net, inputs: net(*inputs))


def test_fused_attention_on_the_cpu_is_counted():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(2, 3, 5, 8))

        def forward(self, key):
            return F.scaled_dot_product_attention(self.query, key, key)

    product = 2 * 2 * 3 * 5 * 7 * 8
    # Two matrix products in the forward pass, and two in the backward pass, because `key` requires no gradient.
    assert count_of(Attention(), torch.randn(2, 3, 7, 8)) == 4 * product


def test_recurrent_layers_are_counted():
    weights = 4 * 16 * (4 + 16)
    # The last time step's hidden state has no gradient with respect to the weights of a later step.
    count = count_of(nn.LSTM(4, 16, batch_first=True), torch.randn(2, 6, 4))
    assert 2 * 2 * 6 * weights < count <= 3 * 2 * 2 * 6 * weights
