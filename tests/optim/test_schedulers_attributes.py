"""Test that the attributes of a user-defined scheduler are saved and restored."""

import abc
import math

import pytest
import torch

from slipstream.optim.scheduler import StepLR
from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.plain_values import plain


def sgd(lr=0.1):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)


class Custom(_ParamScheduler, abc.ABC):
    """A scheduler whose next value depends on attributes that the base class does not define."""

    def __init__(self, optimizer, rate=0.9, **kwargs):
        self.rate, self.count, self.name = rate, 0, "warm"
        self.recent, self.table, self.best, self.function = [1.0], {0: 0, 1: 0, 2: 0}, None, math.sin
        super().__init__(optimizer, "lr", **kwargs)
        self.late = (1, 2)

    def _next(self, value, base):
        self.count += 1
        self.rate *= 0.99
        self.name = "main" if self.count > 3 else self.name
        self.recent.append(value)
        self.table[self.count % 3] += self.count
        self.best = max(self.best or 0.0, value)
        self.created = getattr(self, "created", 0) + 1
        self.late = (self.count, self.created)
        extra = sum(self.recent[-3:]) + self.table[1] + self.best
        return self.rate * (value + 1e-3 * extra * sum(self.late) * (2 if self.name == "main" else 1))


def test_custom_scheduler_resumes_exactly_from_a_file(tmp_path):
    first = sgd()
    scheduler = Custom(first)
    for _ in range(6):
        scheduler.step()
    torch.save(plain([scheduler.state_dict(), first.state_dict()], pytest.fail), tmp_path / "a.pth")
    state, optimizer = torch.load(tmp_path / "a.pth", weights_only=True)
    second = sgd()
    resumed = Custom(second)
    second.load_state_dict(optimizer)
    resumed.load_state_dict(state)
    for _ in range(6):
        scheduler.step()
        resumed.step()
        assert scheduler.get_last_value() == resumed.get_last_value()


def test_unchanged_attributes_come_from_the_new_arguments():
    class Gamma(StepLR):
        def __init__(self, optimizer, step_size, gamma=0.1, offset=1.0):
            super().__init__(optimizer, step_size, gamma)
            self.offset = offset

    scheduler = Gamma(sgd(), 2, offset=1.0)
    scheduler.step()
    assert "attributes" not in scheduler.state_dict()
    other = Gamma(sgd(), 2, offset=5.0)
    other.load_state_dict(scheduler.state_dict())
    assert other.offset == 5.0
