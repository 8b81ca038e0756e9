"""Generate the section of docs/matrix.md about compiled steps from the test cases."""

import test_compiled_capture
import test_compiled_conditioning
import test_compiled_cost
import test_compiled_hooks
import test_compiled_memory
import test_compiled_optimizers
import test_compiled_replaced
import test_compiled_state
import test_compiled_structure
from compiled_runs import FALLS_BACK, IN_FLOAT32, ONE_GRAPH, REFUSED, STEPS, TOLERANCE

_TABLES = (
    test_compiled_state,
    test_compiled_memory,
    test_compiled_hooks,
    test_compiled_optimizers,
    test_compiled_replaced,
    test_compiled_structure,
    test_compiled_conditioning,
    test_compiled_cost,
    test_compiled_capture,
)

_TOP = """## What a compiled step supports

`tests/compiled` runs each of {cases} cases with `accelerate` and `compile`, with `accelerate` only, and in a plain
loop. Most cases run for {steps} steps in float64. Losses, weights, buffers, averages and other recorded values must
agree to within a relative error of {tolerance:g} ({float32:g} for NAdam and RAdam). `make test` and `make matrix` run
{regular} of the cases, at least one of each kind; `make exhaustive` runs the others.

- *{one}*: forward, loss and backward run as a single graph, without warnings. The optimizer update is part of the graph
  if the optimizer can be traced; otherwise it runs after the graph.
- *{back}*: the results are the same. A warning names the cause and, where possible, the line in the user's code. If
  the model cannot be compiled either, a second warning says so.
- *{refused}*: an error is raised before training starts. The message states a remedy.

A compiled step differs from an eager step in these cases:

- A hook on a parameter's AccumulateGrad node (`get_gradient_edge(param).node`) that is added after the second step is
  not detected, because torch does not report such hooks.
- A change to an environment variable that the model or the loss reads is not detected.
- A function with `functools.lru_cache` is traced without its cache, so the function may be called more often.

The last two limitations apply to `torch.compile` in general. In a graph, an `assert` on tensor values raises
`RuntimeError` instead of `AssertionError`. With several processes, anomaly mode and saved-tensor hooks
have no effect on a step that runs as a graph, because all ranks must take the same path.

The tests also compare two steps that share modules or parameters (a GAN, or a model with two optimizers) with plain
loops, with and without `compile`.

| case | compiled | remark |
|---|---|---|
"""


def section():
    """Return the section as Markdown."""
    groups = {title: cases for table in _TABLES for title, cases in table.GROUPS.items()}
    top = _TOP.format(
        cases=sum(map(len, groups.values())),
        regular=sum(case.fast or not case.exhaustive for cases in groups.values() for case in cases),
        steps=STEPS,
        tolerance=TOLERANCE["rtol"],
        float32=IN_FLOAT32["rtol"],
        one=ONE_GRAPH,
        back=FALLS_BACK,
        refused=REFUSED,
    )
    return top + "".join(row for title, cases in groups.items() for row in _rows(title, cases))


def _rows(title, cases):
    """Return a group's table rows, one for each expected behavior."""
    for expect in (ONE_GRAPH, FALLS_BACK, REFUSED):
        found = [case for case in cases if case.expect == expect]
        if found:
            names = "; ".join(case.what for case in found)
            remarks = [f"{case.what}: {case.remark}" for case in found if case.remark]
            if all(case.line for case in found):
                remarks.append("the warning names the line")
            elif any(case.line for case in found):
                remarks.append("some of the warnings name the line")
            yield f"| **{title}:** {names} | {expect} | {'; '.join(remarks)} |\n"
