"""Conversion to SyncBN and back, and SyncBN in one process."""

import torch
from torch import nn

from slipstream.model import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(144, 5)
    )


def test_conversion_keeps_keys_tensors_and_options_and_reverts_to_the_same_class():
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


def test_sync_batchnorm_equals_batchnorm_in_one_process():
    x = torch.randn(4, 3, 8, 8)
    plain, converted = network(), convert_sync_batchnorm(network())
    for mode in (True, True, False):
        plain.train(mode), converted.train(mode)
        assert torch.equal(plain(x), converted(x))
    assert torch.equal(plain[1].running_var, converted[1].running_var)


def test_state_dict_is_compatible_with_torch_sync_batchnorm():
    converted = convert_sync_batchnorm(network())
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    theirs.load_state_dict(converted.state_dict())
    converted.load_state_dict(theirs.state_dict())
