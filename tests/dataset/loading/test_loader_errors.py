"""Tests of the messages of errors that are raised in data loader workers."""

import pytest
from torch.utils.data import Dataset

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.errors import ConfigError, DataError, UnknownNameError


class Failing(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise self.error


def failure(error):
    batches = iter(
        build_dataloader(dict(dataset=Failing(error), num_workers=1), 1, "train_dataloader", training=True)
    )
    with pytest.raises(type(error)) as caught:
        next(batches)
    batches._shutdown_workers()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        DataError("'a.png' is broken:\n  'b.png', too"),
        ConfigError("must be 1: DataError: x, not 2", "transforms"),
        UnknownNameError("unknown name 'it'"),
    ],
)
def test_worker_error_keeps_its_message_and_traceback(error):
    caught = failure(error)
    assert str(caught) == str(error)
    assert "in __getitem__" in str(caught.__cause__)


def test_other_worker_errors_keep_the_torch_message_with_the_traceback():
    assert "in __getitem__" in str(failure(ValueError("custom error")))
