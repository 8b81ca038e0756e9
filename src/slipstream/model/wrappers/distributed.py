"""DDP wrappers for data parallelism, named as in MMEngine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slipstream.config import options
from slipstream.dist import gather_named_tensors, own_or_mean
from slipstream.errors import ConfigError, ModelError
from slipstream.model.base_model import BaseModel, run_forward
from slipstream.registry import MODEL_WRAPPERS
from slipstream.step import EagerStep
from slipstream.typecheck import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from slipstream.optim import OptimWrapper, OptimWrapperDict

__all__ = [
    "MMDistributedDataParallel", "MMSeparateDistributedDataParallel", "comm_hook_state", "device_ids",
    "is_model_wrapper", "load_comm_hook_state", "train_wrapped", "unwrap_model",
]  # fmt: skip

MODEL_WRAPPERS.register_module(module=DistributedDataParallel)


def train_wrapped(wrapper: Any, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """Train on one batch through the wrapper's forward, and return 0-dim device tensors to log."""

    def forward(batch: Any) -> Any:
        return run_forward(wrapper, wrapper.module.data_preprocessor(batch, True), "loss")

    return EagerStep(forward, wrapper, optim_wrapper, wrapper.module.parse_losses)(data)


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(DistributedDataParallel):
    """torch's `DistributedDataParallel` with a `train_step`, `val_step` and `test_step`.

    Args:
        module: the model.
        broadcast_buffers: whether to broadcast the buffers of rank 0 before every forward pass. If False, each rank has
            its own BatchNorm statistics (`SyncBuffersHook` averages them; with SyncBN they are identical).
        gradient_as_bucket_view: whether gradients are views of DDP's buckets, which saves memory and a copy and does
            not change the results.
        comm_hook: gradient compression: `'bf16'`, `'fp16'`, `'powersgd'`, or
            `dict(type='powersgd', rank=2, start_step=1000)`; see `PowerSGDOptions`.
        kwargs: other arguments for `DistributedDataParallel`.

    Raises:
        ConfigError: if `comm_hook` is invalid.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        gradient_as_bucket_view: bool = True,
        comm_hook: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["gradient_as_bucket_view"] = gradient_as_bucket_view
        with warnings.catch_warnings():
            # The replacement that torch recommends for this argument still synchronizes buffers once at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, broadcast_buffers=broadcast_buffers, **kwargs)
        self.comm_hook = None if comm_hook is None else make_comm_hook(comm_hook, self.process_group, module)
        if self.comm_hook is not None:
            self.register_comm_hook(self.comm_hook, run_comm_hook)

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

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log."""
        return train_wrapped(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        return self.module.test_step(data)


@MODEL_WRAPPERS.register_module()
class MMSeparateDistributedDataParallel(BaseModel):
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

    def train_step(self, data: Any, optim_wrapper: OptimWrapper | OptimWrapperDict) -> dict[str, Tensor]:
        """Run the model's training step."""
        logs: dict[str, Tensor] = self.module.train_step(data, optim_wrapper)
        return logs

    def val_step(self, data: Any) -> Any:
        """Return the predictions of the model."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Return the predictions of the model."""
        return self.module.test_step(data)

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


def comm_hook_state(model: nn.Module) -> dict[str, Any]:
    """Return the states of a model's communication hooks by wrapper name; every rank must call this function."""
    return {name: hook.state_dict() for name, hook in _stateful_hooks(model)}


def load_comm_hook_state(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Load the result of `comm_hook_state`; hooks without a saved state keep their initial state."""
    for name, hook in _stateful_hooks(model):
        if name in states:
            hook.load_state_dict(states[name])


def _stateful_hooks(model: nn.Module) -> list[tuple[str, PowerSGD]]:
    hooks = ((name, getattr(module, "comm_hook", None)) for name, module in model.named_modules())
    return [(name, hook) for name, hook in hooks if isinstance(hook, PowerSGD)]


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
# PyTorch's own hooks are not used: the bfloat16 hook requires a CUDA build, and the PowerSGD hook waits inside
# callbacks on gloo's threads, which deadlocks with several buckets. It also stores its state by bucket, so the state
# cannot be saved in a checkpoint.

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = (*_HALVES, "powersgd")


@dataclass(frozen=True)
class PowerSGDOptions:
    """Options for `comm_hook=dict(type='powersgd', ...)`."""

    rank: PositiveInt = 2
    """Number of columns in each factor; a matrix (n, m) is sent as (n + m) * rank values."""
    start_step: NonNegativeInt = 1000
    """Number of initial steps with exact gradients; compressing gradients early in training is harmful. About
    10% of all steps is a good value."""


class HalfPrecision:
    """Send gradients as bfloat16 or float16, after dividing them by the number of ranks to avoid overflow."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return a future for the bucket's mean over all ranks, in the bucket's dtype."""
        buffer = bucket.buffer()
        return _mean(buffer, buffer.div_(self.group.size()).to(self.dtype), self.group)


class PowerSGD:
    """Send two factors of rank r instead of each large gradient (Vogels et al. 2019, arXiv:1905.13727).

    A gradient (n, ...) is treated as a matrix (n, m). It is sent uncompressed unless the two factors together are
    smaller than half its size. The approximation error is added to the next gradient (error feedback), and the second
    factor of each step is the starting point of the next power iteration. The two small all-reduces per bucket do not
    overlap with the backward pass.

    Args:
        group: process group.
        parameters: names and parameters of the model.
        options: compression options.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Iterable[tuple[str, nn.Parameter]],
        options: PowerSGDOptions,
    ) -> None:
        self.group = group
        self.options = options
        self.step = 0
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in parameters}

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return a future for the (approximate) mean of the bucket over all ranks."""
        if self.step < self.options.start_step:
            buffer = bucket.buffer()
            future = _mean(buffer, buffer.div_(self.group.size()), self.group)
        else:
            self._approximate(bucket)
            future = torch.futures.Future(devices=_devices(bucket.buffer()))
            future.set_result(bucket.buffer())
        self.step += bucket.is_last()
        return future

    def _approximate(self, bucket: GradBucket) -> None:
        named = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = list(zip(named, bucket.gradients(), strict=True))
        compressed = [(name, gradient) for name, gradient in gradients if self._compresses(gradient)]
        exact = [gradient for _, gradient in gradients if not self._compresses(gradient)]
        matrices = [self._corrected(name, gradient) for name, gradient in compressed]
        # Only the column space of a basis matters, so the sums of the bases are not divided by the number of ranks.
        before = [self._factor(name, m) for (name, _), m in zip(compressed, matrices, strict=True)]
        bases = [m @ factor for m, factor in zip(matrices, before, strict=True)]
        sums = self._sum([*exact, *bases])
        for gradient, total in zip(exact, sums[: len(exact)], strict=True):
            gradient.copy_(total.div_(self.group.size()))
        bases = [torch.linalg.qr(basis).Q for basis in sums[len(exact) :]]
        factors = self._sum([m.T @ basis for m, basis in zip(matrices, bases, strict=True)])
        for (name, gradient), m, basis, factor, old in zip(
            compressed, matrices, bases, factors, before, strict=True
        ):
            approximation = basis @ factor.div_(self.group.size()).T
            gradient.copy_(approximation.view(gradient.shape))
            # After an overflow, the loss scaler skips the step, and all ranks keep their previous errors and factors.
            finite = factor.isfinite().all()
            error = self.errors.get(name)
            zero = torch.zeros_like(m) if error is None else error.to(m)
            self.errors[name] = torch.where(finite, m.sub_(approximation), zero)
            self.factors[name] = torch.where(finite, factor, old)

    def _compresses(self, gradient: Tensor) -> bool:
        n, m = _matrix(gradient)
        return 2 * (n + m) * min(n, m, self.options.rank) < n * m

    def _corrected(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.to(_compute_dtype(gradient), copy=True).reshape(_matrix(gradient))
        error = self.errors.get(name)
        return matrix if error is None else matrix.add_(error.to(matrix.device))

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        n, m = matrix.shape
        if name not in self.factors:  # initialized to the same values on every rank
            generator = torch.Generator().manual_seed(list(self._names.values()).index(name))
            self.factors[name] = torch.randn(m, min(n, m, self.options.rank), generator=generator)
        return self.factors[name].to(matrix)

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks, computed with one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([t.to(_compute_dtype(t)).flatten() for t in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the step, each rank's errors (on rank 0) and the factors; every rank must call this method."""
        errors = gather_named_tensors(self.errors, self.group)
        return {"step": self.step, "errors": errors, "factors": dict(self.factors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Factors with a different number of columns are reinitialized.

        If the number of processes has changed, each process receives the mean of the errors, which preserves the mean
        error over all processes.
        """
        self.step = state_dict["step"]
        self.errors = own_or_mean(state_dict["errors"], self.group.rank(), self.group.size())
        self.factors = {
            name: factor
            for name, factor in state_dict["factors"].items()
            if factor.shape[1] == self.options.rank
        }


def make_comm_hook(
    comm_hook: str | Mapping[str, Any], group: dist.ProcessGroup, module: nn.Module
) -> HalfPrecision | PowerSGD:
    """Return the hook for `comm_hook`: `'bf16'`, `'fp16'`, `'powersgd'`, or a dict with one of these as its `type`.

    Raises:
        ConfigError: if the type or an option is unknown.
    """
    user_config: Mapping[str, Any] = comm_hook if isinstance(comm_hook, Mapping) else {"type": comm_hook}
    kind = user_config.get("type")
    if kind not in _KINDS:
        raise ConfigError(
            f"must be one of {_KINDS} or a dict with one of these as its 'type', not {comm_hook!r}",
            "comm_hook",
        )
    rest = {key: value for key, value in user_config.items() if key != "type"}
    if kind == "powersgd":
        return PowerSGD(group, module.named_parameters(), options(PowerSGDOptions, rest, "comm_hook"))
    if rest:
        raise ConfigError(f"'{kind}' accepts no options, but got {sorted(rest)}; remove them", "comm_hook")
    return HalfPrecision(group, _HALVES[kind])


def run_comm_hook(state: HalfPrecision | PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run a hook; pass this function to `DistributedDataParallel.register_comm_hook(state, run_comm_hook)`."""
    return state(bucket)


run_comm_hook.__annotations__.clear()  # DDP compares annotations with classes, but these annotations are strings


def _mean(buffer: Tensor, scaled: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Return a future for `buffer`, filled with the sum of `scaled` over all ranks."""
    work = dist.all_reduce(scaled, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda f: buffer.copy_(f.value()[0]))
    return done


def _matrix(tensor: Tensor) -> tuple[int, int]:
    n = tensor.shape[0] if tensor.ndim else 1
    return n, tensor.numel() // max(n, 1)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype used for computation; QR does not support half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _devices(tensor: Tensor) -> list[int | str | torch.device]:
    return [] if tensor.device.type == "cpu" else [tensor.device]
