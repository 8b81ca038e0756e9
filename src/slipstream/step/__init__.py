"""The training step: eager, or compiled as one graph.

- `interface`: the interfaces of the steps.
- `eager`: the step without compilation.
- `graph`: the compiled step; it captures, compiles, verifies and runs graphs.
- `parts`, `average`: operations around the optimizer update, shared by the eager and the compiled step.
- `update`, `numerics`, `sync`: the optimizer update, loss scale and gradient sync inside a graph.
- `captured`, `class_changes`: the state shared by a step's graphs, and checks for changes that invalidate them.
- `verification`, `reference`: comparison of a new graph with the eager step and a float64 reference.
- `direct`, `cuda_graph`: calls to compiled code that bypass Dynamo, and their replay as CUDA graphs.
- `background`: compilation in a forked process.
- `backward_passes`: detection of losses that differentiate the model's gradients.
- `trained_parameters`: detection of trained parameters that `Module.to` has replaced.
- `dynamo`, `leaves`: Dynamo settings for the capture, and the leaves of nested batches.
"""

from slipstream.step.eager import EagerStep, sum_losses
from slipstream.step.interface import CompiledStep, Step

__all__ = ["CompiledStep", "EagerStep", "Step", "sum_losses"]
