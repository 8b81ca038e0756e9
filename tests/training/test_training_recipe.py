"""Tests of old checkpoint keys and misspelled sections in recipes, and of errors with the user's config paths."""

import pytest

from slipstream.errors import UnknownNameError
from slipstream.training.metrics import PixelAccuracy
from slipstream.training.recipe import recipe_config


class Own(PixelAccuracy):
    """A custom metric whose result names are unknown until its first evaluation."""


def recipe(**sections):
    return dict(
        experiment_name="exp",
        architecture="regseg48",
        arch_params=dict(num_classes=19),
        train_dataloader="street_scenes_train",
        val_dataloader="street_scenes_val",
        training_hyperparams=dict(max_epochs=1, initial_lr=0.1, loss="CrossEntropyLoss"),
        **sections,
    )


@pytest.mark.parametrize("key", ["training_parms", "dataset_param", "arch_parms"])
def test_misspelled_section_raises_an_error(key):
    with pytest.raises(UnknownNameError, match=rf"{key}: unknown key; did you mean"):
        recipe_config(recipe(**{key: dict(max_epochs=3)}))


# ---- config paths ----------------------------------------------------------------------------------------
