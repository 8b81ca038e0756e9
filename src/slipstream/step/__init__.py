"""The training step: eager, or compiled as one graph.

- `function`: the step as one function, run as it is (`EagerStep`) or compiled.
- `graph`: the compiled step; it captures, compiles, verifies and runs graphs.
- `parts`: operations around the optimizer update, shared by the eager and the compiled step.
- `update`, `numerics`, `sync`: the optimizer update, loss scale and gradient sync inside a graph.
- `captured`: the state shared by a step's graphs, checks for changes that invalidate them, and calls without Dynamo.
- `verification`: comparison of a new graph with the eager step and a float64 reference.
- `cuda_graph`: replays calls to compiled code as CUDA graphs.
- `dynamo`, `leaves`: Dynamo settings for the capture, and the leaves of nested batches.
"""

from slipstream.step.function import CompiledStep, EagerStep, Step
from slipstream.step.losses import sum_losses

__all__ = ["CompiledStep", "EagerStep", "Step", "sum_losses"]
