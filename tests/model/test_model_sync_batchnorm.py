"""Tests of the conversion to SyncBN and back, and of SyncBN in one process."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.errors import ModelError
from slipstream.model import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(144, 5)
    )


def test_conversion_keeps_keys_tensors_and_options_and_is_reversible():
    model = network().eval()
    before = dict(model.state_dict(keep_vars=True))
    converted = convert_sync_batchnorm(model)
    assert isinstance(converted[1], SyncBatchNorm)
    assert converted[1].momentum is None
    assert not converted[1].training
    after = dict(converted.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(revert_sync_batchnorm(converted)[1]) is nn.BatchNorm2d


class Act(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Own(nn.BatchNorm2d):
    """As timm's BatchNormAct2d, this class does not call the forward of its base class."""

    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, training=True).relu()


class OwnInTraining(nn.BatchNorm2d):
    def forward(self, x):
        return Own.forward(self, x) if self.training else super().forward(x)


def test_conversion_keeps_hooks_attributes_and_subclasses():
    model = nn.Sequential(nn.BatchNorm2d(4), Act(4, momentum=0.3)).double()
    model[0].register_forward_hook(lambda module, inputs, output: output + module.shift)
    model[0].shift = 2.0
    layers, x = list(model), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    converted = convert_sync_batchnorm(model)
    assert list(converted) == layers
    assert all(isinstance(layer, SyncBatchNorm) for layer in converted)
    assert isinstance(copy.deepcopy(converted)[1], Act)
    assert torch.equal(converted(x), expected)
    assert [type(layer) for layer in revert_sync_batchnorm(converted)] == [nn.BatchNorm2d, Act]


class Counting(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_conversion_does_not_change_buffers():
    assert convert_sync_batchnorm(nn.Sequential(Counting(4)))[0].calls == 0


def test_layers_whose_statistics_cannot_be_synchronized_are_refused_by_name():
    replaced = nn.BatchNorm2d(4)
    replaced.forward = lambda x: x
    for layer, kind in (
        (Own(4), "Own"),
        (OwnInTraining(4).eval(), "OwnInTraining"),
        (replaced, "BatchNorm2d"),
        (nn.LazyBatchNorm2d(), "LazyBatchNorm2d"),
    ):
        model = nn.Sequential(nn.BatchNorm2d(4), layer)
        with pytest.raises(ModelError, match=rf"the layer '1' \({kind}\)"):
            convert_sync_batchnorm(model)
        assert type(model[0]) is nn.BatchNorm2d


def test_sync_batchnorm_matches_batchnorm_in_one_process():
    x = torch.randn(4, 3, 8, 8)
    plain, converted = network(), convert_sync_batchnorm(network())
    for mode in (True, True, False):
        plain.train(mode), converted.train(mode)
        assert torch.equal(plain(x), converted(x))
    assert torch.equal(plain[1].running_var, converted[1].running_var)


def test_state_dict_is_compatible_with_torch_sync_batchnorm():
    converted = convert_sync_batchnorm(network())
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    assert type(convert_sync_batchnorm(theirs)[1]) is SyncBatchNorm
    theirs.load_state_dict(converted.state_dict())
    converted.load_state_dict(theirs.state_dict())


class Copies(TorchDispatchMode):
    """Records the float32 copies that have a given shape, as weak references to their storage."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.float32 and out.shape == self.shape:
            self.found.append(StorageWeakRef(out.untyped_storage()))
        return out


@pytest.fixture
def two_ranks(monkeypatch):
    """Simulate two ranks, with a sum over the ranks that returns its input unchanged."""
    for name, value in dict(
        get_world_size=lambda: 2, get_dist_info=lambda: (0, 2), traceable_sum=lambda x: x
    ).items():
        monkeypatch.setattr(f"slipstream.model.sync_batchnorm.{name}", value)


def test_input_changed_in_place_raises_an_error(two_ranks):
    x = torch.randn(4, 3, 8, 8).bfloat16()
    out = SyncBatchNorm(3)(x)
    x.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_backward_keeps_only_low_precision_inputs(dtype, two_ranks):
    """In the first pass, the test's hooks disable those of the layer, so this pass provides the reference gradients."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    gradients, alive = [], []
    for hooks in (True, False):
        layer, low = SyncBatchNorm(3), x.to(dtype).requires_grad_()
        with Copies(x.shape) as copies:
            if hooks:
                with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    out = layer(low)
            else:
                out = layer(low)
        alive.append([not copy.expired() for copy in copies.found])
        gradients.append(torch.autograd.grad(out.square().sum(), [low, *layer.parameters()]))
    assert alive == [[True], [False]]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
