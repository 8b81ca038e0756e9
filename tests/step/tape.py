"""A mock of CUDA graphs."""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Records a function's tensor operations, and a copy of each input tensor from before its first use."""

    def __init__(self):
        self.operations, self.before = [], {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # not every operator declares the tensors that it modifies
            if isinstance(tensor, torch.Tensor):
                self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        results = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, results))
        return results


class Tape:
    """A mock of CUDA graphs.

    A replay repeats the captured tensor operations without running the function's Python code.
    """

    def __init__(self):
        self.warmed = self.captured = self.replayed = 0

    def warm_up(self, run):
        self.warmed += 1
        return run()

    def capture(self, run):
        self.captured += 1
        with Recorder() as recorder:
            outputs = run()
        with torch.no_grad():
            for tensor, before in recorder.before.values():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        return outputs, partial(self.replay, recorder.operations)

    @torch.no_grad()
    def replay(self, operations):
        self.replayed += 1
        for operation, args, kwargs, results in operations:
            again = operation(*args, **kwargs)
            if any(returned.alias_info is not None for returned in operation._schema.returns):
                continue  # a view or an in-place operation
            for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor):
                    place.copy_(value)
