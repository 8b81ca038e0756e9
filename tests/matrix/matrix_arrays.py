"""Covering arrays: a few training runs that contain all pairs of options.

A factor is the network, a set of mutually exclusive options, or an option that is on or off. For every two values of
different factors that can be combined, a covering array has at least one run with both. A run enables about half of the
options, so it tests many pairs at once, including pairs of which only one option is on.
"""

from collections import Counter
from itertools import combinations, product
from operator import itemgetter

from matrix_nets import NETS
from matrix_options import ONE_OF, OPTIONS, REFUSED, possible, refusal

NET = 0
"""The index of the factor that is the network. The options' indices start at 1."""
SEEDS = 10
"""The number of candidates for each run of an array. More candidates take longer and do not make the arrays smaller."""

TOO_CLOSE = [
    {"transformer", "bf16", average, other}
    for average, other in product(("EMA", "SWA"), ("accumulation", "layer decay"))
]
"""Values that do not occur together, because the averages are so close to the weights that the tolerance of bf16 could
hide a missing average."""


def pair_runs(processes):
    """Return the runs of a covering array, as tuples of a network and options, that cover all pairs of options.

    Each run starts with a pair that does not occur yet. Then each of the other factors gets the value that adds the
    most new pairs. Of several candidates that start with different pairs, the run with the most new pairs is used.
    """
    factors = _factors(processes)
    missing, runs = dict.fromkeys(_allowed_pairs(processes, factors)), []
    while missing:
        candidates = [_run(processes, factors, dict(pair), missing) for pair in list(missing)[:SEEDS]]
        run, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing.keys()))
        for pair in pairs:
            missing.pop(pair, None)
        runs.append((run[NET], tuple(option for option in OPTIONS if option in run.values())))
    return runs


def refused_runs(processes):
    """Return each combination that raises an error, once per network for which it does."""
    return [
        (net, tuple(options))
        for *options, only in REFUSED
        for net in NETS
        if only in (None, net) and possible(options, processes, net)
    ]


def _factors(processes):
    """Return the values of each factor: the networks, then options. The value None means that an option is off."""
    groups = [[option for option in OPTIONS if option in group] for group in ONE_OF]
    groups += [[option] for option in OPTIONS if not any(option in group for group in ONE_OF)]
    available = [[option for option in group if possible([option], processes)] for group in groups]
    return [list(NETS), *([*group, None] for group in available if group)]


def _run(processes, factors, run, missing):
    """Add a value for each missing factor to the run. Return the run and its pairs."""
    needed = Counter(value for pair in missing for value in pair)
    for number, values in enumerate(factors):
        if number not in run:
            allowed = [value for value in values if _allowed(processes, {**run, number: value})]
            new = {value: len(_pairs(run, number, value) & missing.keys()) for value in allowed}
            run[number] = max(allowed, key=lambda value: (new[value], needed[number, value]))
    return run, set(combinations(sorted(run.items(), key=itemgetter(0)), 2))


def _allowed_pairs(processes, factors):
    values = [[(number, value) for value in values] for number, values in enumerate(factors)]
    for one, other in combinations(values, 2):
        for pair in product(one, other):
            if any(_allowed(processes, {NET: net, **dict(pair)}) for net in NETS):
                yield pair


def _allowed(processes, run):
    """Return whether a run is possible and raises no error. Factors may be missing."""
    net, options = run.get(NET), [value for number, value in run.items() if number != NET and value]
    if any(values <= {net, *options} for values in TOO_CLOSE):
        return False
    return possible(options, processes, net) and refusal(options, net) is None


def _pairs(run, number, value):
    """Return the pairs of an additional value and each value of a run."""
    return {tuple(sorted([item, (number, value)], key=itemgetter(0))) for item in run.items()}
