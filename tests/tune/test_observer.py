"""The loss that trials compare."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.tune.observer import total_loss


def test_the_minimized_loss_is_compared():
    assert float(total_loss({"loss": torch.tensor(3.0), "loss_aux": torch.tensor(1.0)})) == 3.0
    assert (
        float(total_loss({"loss_g": torch.tensor(3.0), "d_loss": torch.tensor([1.0, 2.0]), "acc": 1.0}))
        == 6.0
    )


def test_a_step_without_a_loss_cannot_be_compared():
    with pytest.raises(ModelError, match=r"returns \['acc'\], but no entry with 'loss' in its name"):
        total_loss({"acc": torch.tensor(1.0)})
