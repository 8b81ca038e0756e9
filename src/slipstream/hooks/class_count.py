"""Set the model's number of classes from the dataset, or check that the numbers match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.dataset.loading.loader import loaders_of
from slipstream.errors import ModelError
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.model.tasks import Task
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class ClassCountHook(Hook):
    """Set the number of classes of a `Segmentor`, `Classifier` or `SupervisedModel` from the dataset.

    This is one of the default hooks (`class_count`). It runs before training, validation and testing, and skips
    datasets without `classes` in their `metainfo`. A model with one class is also valid for a dataset with two classes:
    its only output is the score of the second class.

    Raises:
        ModelError: the model was built with a different number of classes.
    """

    def before_train(self, runner: Runner) -> None:
        """Check the training data."""
        self._compare(runner, runner.train_loop)

    def before_val(self, runner: Runner) -> None:
        """Check the validation data."""
        self._compare(runner, runner.val_loop)

    def before_test(self, runner: Runner) -> None:
        """Check the test data."""
        self._compare(runner, runner.test_loop)

    def _compare(self, runner: Runner, loop: Any) -> None:
        model: Any = unwrap_model(runner.model)
        for loader in loaders_of(loop):
            classes = (getattr(loader.dataset, "metainfo", None) or {}).get("classes")
            if classes is None or not isinstance(model, Task) or (model.num_classes, len(classes)) == (1, 2):
                continue
            if model.num_classes not in (None, len(classes)):
                count, more = len(classes), ", ..." * (len(classes) > 2)
                raise ModelError(
                    f"the dataset has {count} class{'es' * (count != 1)} ({', '.join(classes[:2])}{more}), but the "
                    f"model has {model.num_classes}; set the model's num_classes (arch_params.num_classes in a recipe) "
                    f"to {count}"
                )
            model.num_classes = len(classes)
