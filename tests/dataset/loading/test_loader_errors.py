"""What a worker of a loader says when it fails."""

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
        UnknownNameError("nobody knows 'it'"),
    ],
)
def test_a_workers_error_says_its_own_sentence_and_keeps_the_workers_traceback(error):
    caught = failure(error)
    assert str(caught) == str(error)
    assert "in __getitem__" in str(caught.__cause__)


def test_a_users_error_in_a_worker_keeps_torchs_text_with_the_traceback():
    assert "in __getitem__" in str(failure(ValueError("the user's own")))
