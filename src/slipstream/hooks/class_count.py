"""A network made for another number of classes is found before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import ModelError
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.model.tasks import Task
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from slipstream.runner import Runner

__all__ = ["ClassCountHook"]


@HOOKS.register_module()
class ClassCountHook(Hook):
    """Tell a `Segmentor`, `Classifier` or `SupervisedModel` how many classes the data set has, before its first batch.

    One of the default hooks (`class_count`). Data sets that declare no `classes` in their `metainfo` pass.

    Raises:
        ModelError: the network was made for another number.
    """

    def before_train(self, runner: Runner) -> None:
        """Look at the training data."""
        self._compare(runner, runner.train_dataloader)

    def before_val(self, runner: Runner) -> None:
        """Look at the validation data."""
        self._compare(runner, runner.val_dataloader)

    def before_test(self, runner: Runner) -> None:
        """Look at the test data."""
        self._compare(runner, runner.test_dataloader)

    def _compare(self, runner: Runner, loader: DataLoader[Any]) -> None:
        classes = (getattr(loader.dataset, "metainfo", None) or {}).get("classes")
        model: Any = unwrap_model(runner.model)
        if classes is None or not isinstance(model, Task):
            return
        if model.num_classes not in (None, len(classes)):
            raise ModelError(
                f"the data set has {len(classes)} classes ({', '.join(classes[:2])}, ...), and the network is made "
                f"for {model.num_classes}: set its num_classes (arch_params.num_classes in a recipe) to {len(classes)}"
            )
        model.num_classes = len(classes)
