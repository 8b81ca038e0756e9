"""Render docs/matrix.md from the tables that the tests use: `python tests/matrix/matrix_page.py`."""

import sys
from pathlib import Path

from matrix_arrays import pair_runs, triple_runs
from matrix_by_hand import WINDOW
from matrix_nets import BATCH, NETS, OPTIMIZERS, STEPS
from matrix_options import (
    BREAKS,
    OF_SEVERAL,
    OPTIONS,
    REFUSED,
    TOLERANCES,
    possible,
    refusal,
    triples,
)

from slipstream.speed.plan import REFUSED as REFUSED_PLANS

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
COMPILED = Path(__file__).parents[1] / "compiled"

_TOP = """# Combinations of options

`tests/matrix` trains two small networks ({nets}) with combinations of options, for {steps} steps of {batch} samples
each. The tests compare losses, final weights and averages with those of a hand-written PyTorch loop, which trains
eagerly on the whole batch in one process. They also check that only the requested options were active.
`python tests/matrix/matrix_page.py` generates this page from the tables that the tests use.

- `make test` trains with each option separately, in one process, on both networks.
- `make matrix` trains with every pair of options in {one} runs in one process and {two} runs in two processes. It also
  tests all compatible options together, and the combinations that raise an error.
- `make exhaustive` trains with every triple that contains `compile=step` in {step} runs in one process, and with each
  pair and each of the {triples} triples separately. It tests all compatible options together in every precision, with
  and without SAM. It takes too long for `.ci/run`, which runs only the other two commands.

These sets of {one}, {two} and {step} runs are covering arrays (`tests/matrix/matrix_arrays.py`). Each run enables many
options. For every two options that can be combined, there are runs with both, with only one of them, and with neither.
Each option is tested on both networks, but a pair may be tested on only one.

In `make exhaustive`, each pair is tested on one network in one process and on the other network in two processes; pairs
that require several processes are tested on both networks. Each triple is tested once, alternating between the networks
and between one process and two.

- ✓: the results match the hand-written loop
- ✗: the combination raises an error (see below)
- ✓/✗: the combination raises an error on one of the networks
- 1/2: only one of the two options can be selected
"""

_BOTTOM = """## Tolerances

| precision | losses, weights and averages, relative | weights and averages, absolute |
|---|---|---|
{tolerances}

- `bf16` and `fp16` are compared with the same loop under autocast. fp16 starts with a loss scale at which the first
  step overflows. The comparison includes the skipped step and the changes to the loss scale. On an accelerator, the
  absolute tolerances of both precisions are doubled, because compiled kernels can differ from those that the loop
  uses.
- In each precision, the tests detect an option that should change the results but has no effect: in the hand-written
  loop, each such option changes weights or averages by more than ten times the absolute tolerance.
- SWA averages the weights after every second update. Layer decay treats the first convolution and the block as its
  layers.
- For two processes without SyncBN, the loop also normalizes the two halves of a batch separately.
- `accumulation` uses windows of {window} batches. The last window is smaller. `resume` ends a run in the middle of an
  epoch and of a window, and a second run continues the first.
- The graphs that Dynamo captures run without compilation. Graphs of `conv` that recompute a block run with the
  `aot_eager` backend. Inductor compiles one run of each network with all options except accumulation, resume and SAM,
  and one run of `conv` with SAM.
- All compatible options (EMA instead of SWA) are enabled together in fp32, bf16 and fp16. One process runs the step
  as one graph, with a compiled model, and eagerly. Two processes run it as one graph, and with FSDP2 and a compiled
  model. `make matrix` selects some of these combinations, and `make exhaustive` tests all of them, with and without
  SAM.
- With {breaks}, the graph can break where shards are gathered. The
  [compilation report](options/compile.md#the-report) lists these breaks.

## Combinations that raise an error

{found}

Invalid plans raise an error before training:

{plans}
"""


def cell(row, column, processes):
    """Return the table cell for two options."""
    if row == column:
        return ""
    nets = [net for net in NETS if possible((row, column), processes, net)]
    if not nets:
        return "1/2"
    refused = [refusal((row, column), net) is not None for net in nets]
    return "✗" if all(refused) else "✓/✗" if any(refused) else "✓"


def table(processes):
    """Return the Markdown table of all pairs below the diagonal."""
    names = [name for name in OPTIONS if processes > 1 or name not in OF_SEVERAL]
    lines = ["| | " + " | ".join(names[:-1]) + " |", "|---" * len(names) + "|"]
    for i, row in enumerate(names[1:], 1):
        cells = [cell(row, column, processes) for column in names[:i]]
        lines.append(f"| **{row}** | " + " | ".join(cells + [""] * (len(names) - 1 - i)) + " |")
    return "\n".join(lines)


def render():
    """Return the page."""
    if str(COMPILED) not in sys.path:
        sys.path.append(str(COMPILED))
    from compiled_page import section

    count = sum(len(triples(processes, net)) for processes in (1, 2) for net in NETS)
    nets = ", ".join(f"`{net}` with {options['type']}" for net, options in OPTIMIZERS.items())
    found = "\n".join(f"- {_title(*key)}: `{message}`" for key, message in REFUSED.items())
    plans = "\n".join(f"- `{plan.option}`: {plan.message}" for plan in REFUSED_PLANS)
    bounds = "\n".join(f"| {name} | {rel:g} | {absolute:g} |" for name, (rel, absolute) in TOLERANCES.items())
    parts = [
        _TOP.format(
            nets=nets,
            steps=STEPS,
            batch=BATCH,
            triples=count,
            one=len(pair_runs(1)),
            two=len(pair_runs(2)),
            step=len(triple_runs(1)),
        ),
        f"## One process\n\n{table(1)}\n\nSyncBN, DDP and FSDP2 require several processes.\n",
        f"## Two processes\n\n{table(2)}\n\nWithout FSDP2, the model is always wrapped in DDP.\n",
        _BOTTOM.format(
            window=WINDOW,
            tolerances=bounds,
            found=found,
            plans=plans,
            breaks=", ".join(" + ".join(pair) for pair in BREAKS),
        ),
        section(),
    ]
    return "\n".join(parts)


def _title(*key):
    *options, net = key
    return " + ".join(options) + (f" with {OPTIMIZERS[net]['type']}" if net else "")


if __name__ == "__main__":
    PAGE.write_text(render())
