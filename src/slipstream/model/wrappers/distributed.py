"""DDP wrappers for data parallelism, named as in MMEngine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slipstream.errors import ConfigError, ModelError
from slipstream.model.base_model import BaseModel, run_forward
from slipstream.registry import MODEL_WRAPPERS
from slipstream.step import EagerStep

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from slipstream.optim import OptimWrapper, OptimWrapperDict

__all__ = [
    "MMDistributedDataParallel", "MMSeparateDistributedDataParallel", "ModelAttributes",
    "device_ids", "is_model_wrapper", "train_wrapped", "unwrap_model",
]  # fmt: skip

MODEL_WRAPPERS.register_module(module=DistributedDataParallel)


def train_wrapped(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """Train on one batch through the wrapper's forward, and return 0-dim device tensors to log."""

    def loss_of(batch: Any) -> Any:
        losses = run_forward(wrapper, wrapper.module.data_preprocessor(batch, True), "loss")
        return wrapper.module.parse_losses(losses)

    return EagerStep(loss_of, wrapper, optim_wrapper)(data)


# Attributes that torch's DDP sets after its constructor.
_OWN_ATTRIBUTES = ("_authoritative_rank", "buffer_hook")


class ModelAttributes(nn.Module):
    """Base class of wrappers that read and write all attributes except their own in the wrapped model.

    A hook that sets an attribute of `runner.model` thus has the same effect in one and in several processes. The
    attributes of the wrapper's class, such as `forward`, are its own.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (module := vars(self).get("_modules", {}).get("module")) is None:
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = [vars(self), *(vars(self).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))]
        if (
            "_complete" in vars(self)
            and name not in _OWN_ATTRIBUTES
            and not hasattr(type(self), name)
            and not any(name in part for part in own)
        ):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def val_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        return self.module.test_step(data)


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(ModelAttributes, DistributedDataParallel):
    """torch's `DistributedDataParallel` with a `train_step`, `val_step` and `test_step`.

    Args:
        module: the model.
        broadcast_buffers: whether to broadcast the buffers of rank 0 before every forward pass. If False, each rank has
            its own BatchNorm statistics (`SyncBuffersHook` averages them; with SyncBN they are identical).
        gradient_as_bucket_view: whether gradients are views of DDP's buckets, which saves memory and a copy and does
            not change the results.
        comm_hook: gradient compression: `'bf16'` or `'fp16'`.
        kwargs: other arguments for `DistributedDataParallel`.

    Raises:
        ConfigError: if `comm_hook` is invalid.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        gradient_as_bucket_view: bool = True,
        comm_hook: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["gradient_as_bucket_view"] = gradient_as_bucket_view
        with warnings.catch_warnings():
            # The replacement that torch recommends for this argument still synchronizes buffers once at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, broadcast_buffers=broadcast_buffers, **kwargs)
        self._reducer_parameters = list(module.parameters())
        self._reducer_trains = [param.requires_grad for param in self._reducer_parameters]
        self.comm_hook: HalfPrecision | None = None
        if comm_hook is not None:
            if comm_hook not in _HALVES:
                raise ConfigError(
                    f"must be one of {', '.join(_HALVES)}, not {comm_hook!r}; for other hooks, such as PowerSGD, call "
                    "register_comm_hook of the wrapper with a hook from torch.distributed.algorithms.ddp_comm_hooks",
                    "comm_hook",
                )
            self.comm_hook = HalfPrecision(self.process_group, _HALVES[comm_hook])
            self.register_comm_hook(self.comm_hook, run_comm_hook)
        self._function: Callable[[nn.Module, Any], Any] | None = None
        self._complete = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model. Gradients are synchronized for all parameters that are trained now."""
        trains = [param.requires_grad for param in self._reducer_parameters]
        if trains != self._reducer_trains and any(trains) and torch.is_grad_enabled():
            # torch's reducer expects gradients of exactly the parameters that required them when it was created.
            parameters, sparse = self._build_params_for_reducer()
            self._ddp_init_helper(parameters, sparse, {}, self.static_graph)
            if self.comm_hook is not None:
                torch._C._distributed_c10d._register_comm_hook(self.reducer, self.comm_hook, run_comm_hook)
            self._reducer_trains = trains
            for param in self._reducer_parameters:  # frozen in the middle of an accumulation window
                if not param.requires_grad and param.grad is not None:
                    dist.all_reduce(param.grad.div_(self.process_group.size()), group=self.process_group)
        return super().forward(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient synchronization.

        With `static_graph=True`, the first backward pass is synchronized anyway.
        """
        # torch records a static graph during the first synchronized backward pass, and fails if an earlier backward
        # pass was not synchronized. Early synchronization only changes the order of summation over the accumulation
        # window.
        if self.static_graph and not self._static_graph_delay_allreduce_enqueued:
            yield
            return
        with super().no_sync():
            yield

    def call_model(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """Return `function(module, batch)`, and synchronize the gradients of all parameters that the function uses.

        DDP synchronizes only gradients of its own forward pass. Therefore, the whole function runs as this forward
        pass, so that it can call methods and submodules of the model.
        """
        self._function = function
        try:
            return self(batch)
        finally:
            self._function = None

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._function is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        return self._function(self.module, *inputs)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log."""
        return train_wrapped(self, data, optim_wrapper)


@MODEL_WRAPPERS.register_module()
class MMSeparateDistributedDataParallel(ModelAttributes, BaseModel):
    """Wrap each trainable child with DDP separately, for models that train their children alternately (such as GANs).

    The model must override `train_step(data, optim_wrapper)` and call the children in this method.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any) -> None:
        super().__init__(getattr(module, "data_preprocessor", None))
        self.module: Any = module
        for name, child in module.named_children():
            if name != "data_preprocessor" and any(p.requires_grad for p in child.parameters()):
                wrapped = MMDistributedDataParallel(child, broadcast_buffers=broadcast_buffers, **kwargs)
                wrapped.register_state_dict_post_hook(_without_wrapper)
                wrapped.register_load_state_dict_pre_hook(_with_wrapper)
                setattr(module, name, wrapped)
        self._complete = True

    def train_step(self, data: Any, optim_wrapper: OptimWrapper | OptimWrapperDict) -> dict[str, Tensor]:
        """Run the model's training step."""
        return self.module.train_step(data, optim_wrapper)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient synchronization for every child."""
        with ExitStack() as stack:
            for child in self.module.children():
                if isinstance(child, DistributedDataParallel):
                    stack.enter_context(child.no_sync())
            yield


def _without_wrapper(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the wrapper's prefix from the keys, so that checkpoints can also be loaded in a single-process run."""
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key.removeprefix(f"{prefix}module.")] = state.pop(key)


def _with_wrapper(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def is_model_wrapper(model: nn.Module) -> bool:
    """Return whether `model` is a wrapper.

    The wrappers are DDP, `DataParallel` and the classes in `MODEL_WRAPPERS` and its child registries.
    """
    known = (DistributedDataParallel, DataParallel, MMSeparateDistributedDataParallel)
    return isinstance(model, known) or MODEL_WRAPPERS.contains_object(type(model))


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside any wrappers."""
    while is_model_wrapper(model):
        if not isinstance(inner := getattr(model, "module", None), nn.Module):
            raise ModelError(
                f"the wrapper {type(model).__name__} must store its model in its `module` attribute"
            )
        model = inner
    return model


def device_ids(device: torch.device) -> list[int] | None:
    """Return DDP's `device_ids` argument: the index of the current accelerator, or None for the CPU."""
    return None if device.type == "cpu" else [torch.accelerator.current_device_index()]


# ---- communication hooks -------------------------------------------------------------------------------
#
# PyTorch's own hook for bfloat16 is not used, because it requires a CUDA build.

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HalfPrecision:
    """Send gradients as bfloat16 or float16, after dividing them by the number of ranks to avoid overflow."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def run_comm_hook(state: HalfPrecision, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a future for the bucket's mean over all ranks, in the bucket's dtype."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(state.group.size()).to(state.dtype), group=state.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda f: buffer.copy_(f.value()[0]))


run_comm_hook.__annotations__.clear()  # DDP compares annotations with classes, but these annotations are strings
