"""A correction of the code that inductor generates for CPUs."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["correct_tiled_additions"]

_MARK = "_slipstream_corrected"


def correct_tiled_additions() -> None:
    """Correct the index of atomic additions in loops that inductor tiles in two dimensions.

    Inductor generates atomic additions for code in several threads, for example for the gradient of `unfold`.
    `CppTile2DKernel.store` adds the variable of the inner loop to the index, and `CppVecKernel.store` adds it again
    through `ops.index_expr`. The gradients are then wrong, and the code writes beyond the end of the buffer. The
    correction passes the index without the variable. It applies to all code that this process compiles from now on,
    and only if the source code of these methods has this defect, as in torch 2.13.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppTile2DOverrides, CppVecKernel

    original = CppTile2DKernel.store
    if hasattr(original, _MARK):
        return
    adds_variable = (
        "transform_indexing" in inspect.getsource(method)
        for method in (original, CppTile2DOverrides.index_expr)
    )
    if not all(adds_variable) or "ops.index_expr" not in inspect.getsource(CppVecKernel.store):
        return

    def store(self: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if is_atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            CppVecKernel.store(self, name, index, value, mode)
        else:
            original(self, name, index, value, mode)

    setattr(store, _MARK, True)
    CppTile2DKernel.store = store  # type: ignore[method-assign]
