"""Fused optimizers like the ones in torch_npu.

The first `step` or `zero_grad` copies all gradients into one buffer. From then on, the gradients are views of this
buffer, and `zero_grad` fills it with zeros; `set_to_none` is not supported. The real kernels ignore a gradient that is
no longer in the buffer, while the simulated optimizers raise an error.
"""

import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import slipstream.optim


def _fused(base: type[Optimizer], **fixed: object) -> type[Optimizer]:
    class Fused(base):
        def __init__(self, params: object, **kwargs: object) -> None:
            kwargs.pop("use_global_grad_norm", None)
            super().__init__(params, **fixed, **kwargs)
            self.buffer: Tensor | None = None
            self.owners: list[nn.Parameter] = []

        def _combine(self) -> None:
            self.owners = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            if not self.owners:
                return
            if any(p.device.type != "npu" for p in self.owners):
                raise RuntimeError("simulated torch_npu.optim: parameters must be on the NPU")
            self.buffer = torch.cat([p.grad.reshape(-1) for p in self.owners])
            for param, view in zip(self.owners, self._views(), strict=True):
                param.grad = view

        def _views(self) -> list[Tensor]:
            parts = self.buffer.split([p.numel() for p in self.owners])
            return [part.view_as(param) for part, param in zip(parts, self.owners, strict=True)]

        def step(self, closure: object = None) -> object:
            if self.buffer is None:
                self._combine()
            for param, view in zip(self.owners, self._views() if self.owners else [], strict=True):
                storage = None if param.grad is None else param.grad.untyped_storage().data_ptr()
                if storage != self.buffer.untyped_storage().data_ptr():
                    raise RuntimeError("simulated torch_npu.optim: a gradient has left the combined buffer")
                param.grad = view
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = False) -> None:
            if set_to_none:
                raise ValueError("set_to_none is not supported in fused optimizers")
            if self.buffer is None:
                self._combine()
            if self.buffer is None:
                super().zero_grad(set_to_none)
            else:
                self.buffer.zero_()

    return Fused


_BASES = {
    "Adadelta": (torch.optim.Adadelta, {"foreach": False}),
    "Adam": (torch.optim.Adam, {"foreach": False}),
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "SGD": (torch.optim.SGD, {"foreach": False}),
    "RMSprop": (torch.optim.RMSprop, {"foreach": False}),
    "AdamP": (pytorch_optimizer.AdamP, {}),
    "Lamb": (pytorch_optimizer.Lamb, {}),
    "BertAdam": (slipstream.optim.BertAdam, {}),
    "RMSpropTF": (slipstream.optim.RMSpropTF, {}),
}
for _name, (_base, _fixed) in _BASES.items():
    globals()[f"NpuFused{_name}"] = type(f"NpuFused{_name}", (_fused(_base, **_fixed),), {})
