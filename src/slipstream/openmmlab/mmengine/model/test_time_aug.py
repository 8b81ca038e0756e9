"""`BaseTTAModel`, which merges the predictions for several augmented versions of each image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.errors import ConfigError, DataError
from slipstream.openmmlab.mmengine.model.base_model import BaseModel
from slipstream.openmmlab.mmengine.registry import MODELS

__all__ = ["BaseTTAModel"]


@MODELS.register_module()
class BaseTTAModel(BaseModel):
    """Call a model's `test_step` with each augmented version of a batch, and merge the predictions.

    Args:
        module: the model or its configuration.
        data_preprocessor: the model's data preprocessor, if the model is built from a configuration.

    Raises:
        ConfigError: if `module` is neither a model nor a configuration, or has no `test_step`.
    """

    def __init__(self, module: Any, data_preprocessor: Any = None) -> None:
        super().__init__()
        if isinstance(module, Mapping):
            defaults = {} if data_preprocessor is None else {"data_preprocessor": data_preprocessor}
            module = MODELS.build({**module, **defaults})
        if not isinstance(module, nn.Module) or not hasattr(module, "test_step"):
            raise ConfigError(f"must be a model with a test_step, or a dict, not {type(module)}", "module")
        self.module: Any = module

    @abstractmethod
    def merge_preds(self, data_samples_list: list[Any]) -> list[Any]:
        """Return one prediction per sample; an item of `data_samples_list` contains all predictions for one sample."""

    def test_step(self, data: Any) -> Any:
        """Return the merged predictions for a batch. Each value in the batch is a list with one item per augmentation.

        Raises:
            DataError: if the batch is not a dict, list or tuple.
        """
        if isinstance(data, Mapping):
            count = len(next(iter(data.values())))
            batches: list[Any] = [{key: value[i] for key, value in data.items()} for i in range(count)]
        elif isinstance(data, list | tuple):
            batches = [[value[i] for value in data] for i in range(len(data[0]))]
        else:
            raise DataError(
                f"a batch must be a dict, list or tuple, not {type(data).__name__}; check collate_fn"
            )
        predictions = [self.module.test_step(batch) for batch in batches]
        return self.merge_preds(list(zip(*predictions, strict=True)))

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Not supported; call `test_step` instead.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("BaseTTAModel does not implement forward; call test_step")
