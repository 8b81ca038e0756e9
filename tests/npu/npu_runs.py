"""A network, data and optimizers for the NPU tests, and a plain training loop on the CPU."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10


def net():
    """Return a network with BatchNorm and a tied weight."""
    torch.manual_seed(0)
    tied = nn.Linear(8, 8, bias=False)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), tied, nn.Tanh(), tied, nn.Linear(8, 3))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def by_hand(make_optimizer, data, window=1):
    """Return the weights and buffers after a plain loop on the CPU."""
    model = net()
    optimizer = make_optimizer(model.parameters())
    for number, (inputs, targets) in enumerate(data, 1):
        (F.cross_entropy(model(inputs), targets) / window).backward()
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_equal_on_the_host(model, expected, atol=1e-6):
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
