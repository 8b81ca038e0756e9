"""What must hold for a training of the matrix."""

import torch
from matrix_by_hand import STOP, WINDOW, by_hand
from matrix_nets import STEPS
from matrix_options import BREAKS, IN_NUMBERS, TOLERANCES, precision, refusal


def check(net, options, answers):
    """Compare what the processes did with the loop by hand, or see that they were refused with the error expected."""
    if message := refusal(options, net):
        for answer in answers:
            assert isinstance(answer, str), "it is not refused any more: show so in matrix_options.REFUSED"
            assert answer.startswith(message), answer
        return
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert [line for line in answer["warnings"] if not _may_warn(line, options)] == []
        assert answer["in force"] == _expected(options, len(answers))
        assert answer["moves"] == _moves(options)
        if "compile=step" in options and answer["graphs"] is not None:
            assert answer["graphs"] <= _graphs(options)
    _check_numbers(net, options, answers)


def _may_warn(line, options):
    if line.startswith("EMAHook: "):  # an average hardly follows so short a run
        return "EMA" in options
    return line.startswith("torch.compile: ") and any({*pair} <= {*options} for pair in BREAKS)


def _expected(options, processes):
    return {*options, *(["DDP"] if processes > 1 and "FSDP2" not in options else [])}


def _moves(options):
    """Return how often weights move in the last run: not in a step whose gradients overflow."""
    window = WINDOW if "accumulation" in options else 1
    ends = [n for n in range(1, STEPS + 1) if n % window == 0 or n == STEPS]
    overflows = ends[:1] if "fp16" in options else []
    return sum(n not in overflows and (n > STOP or "resume" not in options) for n in ends)


def _graphs(options):
    """Return how many graphs a step may take."""
    graphs = 1 + ("accumulation" in options)  # a window's end, and other batches
    graphs += (
        "scheduler" in options
    )  # one more once SGD's momentum, a plain number in its formula, is seen to move
    graphs += "checkpointing" in options  # AOTAutograd may send Dynamo back to the start
    return graphs * (2 if "resume" in options else 1)  # two runs


def _check_numbers(net, options, answers):
    shares = 1 if net != "conv" or "SyncBN" in options else len(answers)
    losses, weights, averages = by_hand(net, frozenset(options) & {*IN_NUMBERS, "resume"}, shares)
    relative, absolute = TOLERANCES[precision(options)]
    found = torch.stack([answer["losses"] for answer in answers]).mean(0)
    torch.testing.assert_close(found, losses, rtol=relative, atol=0)
    for rank, answer in enumerate(answers):
        share = min(rank, shares - 1)
        bounds = dict(rtol=relative, atol=absolute)
        torch.testing.assert_close(answer["weights"], weights[share], **bounds)
        if averages is None:
            assert answer["averages"] is None
            continue
        theirs = {name: value for name, value in answer["averages"].items() if name in averages[share]}
        torch.testing.assert_close(theirs, averages[share], **bounds)
        apart = max(float((value - weights[share][name]).abs().max()) for name, value in theirs.items())
        assert apart > 10 * absolute, "averages must not stand where the weights are"
