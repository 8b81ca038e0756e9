"""Map config paths in the Runner's errors to SuperGradients' configuration keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slipstream.errors import BuildError, ConfigError

_PATHS = (
    (r"training_params\.ema\.type", "training_params.ema_params.decay_type"),
    (r"training_params\.ema\.", "training_params.ema_params."),
    (r"training_params\.torch_compile\.mode", "training_params.torch_compile_mode"),
    (r"training_params\.torch_compile\.", "training_params.torch_compile_options."),
    (r"custom_hooks\[\d+\]\.metric$", "training_params.metric_to_watch"),
    (r"default_hooks\.checkpoint\.save_best$", "training_params.metric_to_watch"),
    (r"param_scheduler\[\d+\]", "training_params.lr_mode"),
    (r"val_evaluator(?=\[)", "training_params.valid_metrics_list"),
    (r"model\.train_metrics(?=\[)", "training_params.train_metrics_list"),
    (r"model\.training_params\.", "training_params."),
    (r"optim_wrapper\.optimizer(?=\.)", "training_params.optimizer_params"),
    (r"optim_wrapper\.optimizer$", "training_params.optimizer"),
    (r"model\.loss(?=\.)", "training_params.criterion_params"),
    (r"model\.loss$", "training_params.loss"),
    (r"model\.network(?=\.)", "arch_params"),
    (r"model\.network$", "architecture"),
    (r"(train|val)_dataloader\.dataset", r"dataset_params.\1_dataset_params"),
    (r"(train|val)_dataloader\.", r"dataset_params.\1_dataloader_params."),
)
# Keys that name a component, and the keys of its arguments, which are the cause of a `BuildError`.
_ARGUMENTS = {
    "training_params.optimizer": "training_params.optimizer_params",
    "training_params.loss": "training_params.criterion_params",
    "architecture": "arch_params",
}


@contextmanager
def at_user_paths(cfg: Mapping[str, Any]) -> Iterator[None]:
    """Rewrite config paths in the Runner's errors to match the user's configuration.

    The `cfg` argument is the Runner's configuration, translated from the user's configuration. If the user's
    configuration already uses the Runner's syntax, errors are not changed.
    """
    try:
        yield
    except ConfigError as error:
        model = cfg.get("model")
        if "training_params" in cfg and isinstance(model, Mapping) and model.get("type") == "SupervisedModel":
            for pattern, user_path in _PATHS:
                if re.match(pattern, error.path):
                    path = re.sub(f"^{pattern}", user_path, error.path)
                    error.path = _ARGUMENTS.get(path, path) if isinstance(error, BuildError) else path
                    break
        raise
