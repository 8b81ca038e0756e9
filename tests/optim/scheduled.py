"""Small optimizers and a training loop for the scheduler tests."""

import torch


def parameter():
    return torch.zeros(2, requires_grad=True)


def sgd(lr=0.1, **options):
    return torch.optim.SGD(
        [{"params": [parameter()]}, {"params": [parameter()], "lr": lr / 2}], lr=lr, **options
    )


def sgd_with_tensors(lr=0.1):
    optimizer = sgd(lr)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return optimizer


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def history(optimizer, chain, steps, key="lr"):
    values = []
    for _ in range(steps):
        values.append([float(group[key]) for group in optimizer.param_groups])
        for scheduler in chain:
            scheduler.step()
    return values
