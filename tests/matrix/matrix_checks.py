"""Checks for the training runs of the matrix."""

import torch
from matrix_by_hand import STOP, WINDOW, by_hand
from matrix_nets import STEPS
from matrix_options import BREAKS, IN_NUMBERS, TOLERANCES, precision, refusal


def check(net, options, answers):
    """Compare the processes' results with the hand-written loop, or check that they raised the expected error."""
    if message := refusal(options, net):
        for answer in answers:
            assert isinstance(answer, str), "no error was raised; update matrix_options.REFUSED"
            assert answer.startswith(message), answer
        return
    for answer in answers:
        assert isinstance(answer, dict), answer
        unexpected = [line for line in answer["warnings"] if not _may_warn(line, options)]
        assert unexpected == [], unexpected
        wrong = (answer["in force"] ^ _expected(options, len(answers))) - _implied(options)
        assert wrong == set(), wrong
        assert answer["moves"] == _moves(options)
        if "compile=step" in options and answer["graphs"] is not None:
            assert answer["graphs"] <= _graphs(options), (answer["graphs"], _graphs(options))
    _check_numbers(net, options, answers)


def _may_warn(line, options):
    if line.startswith(("EMAHook: ", "speed.ema: ")):  # EMA weights lag behind in such a short run
        return "EMA" in options
    return line.startswith("torch.compile: ") and any({*pair} <= {*options} for pair in BREAKS)


def _expected(options, processes):
    return {*options, *(["DDP"] if processes > 1 and "FSDP2" not in options else [])}


def _implied(options):
    """Return options that other options enable. On accelerators, a loss scaler uses fused kernels to skip steps."""
    return {"fused"} if "fp16" in options and torch.accelerator.is_available() else set()


def _moves(options):
    """Return the number of weight updates in the last run. Steps with gradient overflow are skipped."""
    window = WINDOW if "accumulation" in options else 1
    ends = [n for n in range(1, STEPS + 1) if n % window == 0 or n == STEPS]
    overflows = ends[:1] if "fp16" in options else []
    return sum(n not in overflows and (n > STOP or "resume" not in options) for n in ends)


def _graphs(options):
    """Return the maximum number of graphs for a step."""
    graphs = 1 + ("accumulation" in options)  # last batch of an accumulation window, and other batches
    graphs += "scheduler" in options  # one recompilation because SGD's momentum is a constant in the graph
    graphs += "checkpointing" in options  # AOTAutograd may restart Dynamo
    return graphs * (2 if "resume" in options else 1)  # two runs


def _check_numbers(net, options, answers):
    shards = 1 if net != "conv" or "SyncBN" in options else len(answers)
    losses, weights, averages = by_hand(net, frozenset(options) & {*IN_NUMBERS, "resume"}, shards)
    relative, absolute = TOLERANCES[precision(options)]
    found = torch.stack([answer["losses"] for answer in answers]).mean(0)
    torch.testing.assert_close(found, losses, rtol=relative, atol=0)
    for rank, answer in enumerate(answers):
        shard = min(rank, shards - 1)
        # The loop runs on the CPU. With other kernels, rounding errors change small gradients, and AdamW amplifies
        # the change because it divides gradients by their magnitude.
        other_kernels = torch.accelerator.is_available() and precision(options) != "fp32"
        bounds = dict(rtol=relative, atol=2 * absolute if other_kernels else absolute)
        torch.testing.assert_close(answer["weights"], weights[shard], **bounds)
        if averages is None:
            assert answer["averages"] is None
            continue
        theirs = {name: value for name, value in answer["averages"].items() if name in averages[shard]}
        torch.testing.assert_close(theirs, averages[shard], **bounds)
        apart = max(float((value - weights[shard][name]).abs().max()) for name, value in theirs.items())
        assert apart > 10 * absolute, "the averages are too close to the weights"
