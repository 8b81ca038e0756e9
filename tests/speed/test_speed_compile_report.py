"""Compile reports count graph breaks, recompiles and skipped CUDA graphs separately for each run."""

import logging

import pytest
import torch
from torch import nn

from slipstream.speed.compile_report import CompileReport, explain_failure


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    yield
    logging.getLogger("torch._dynamo").setLevel(logging.NOTSET)


class Printing(nn.Module):
    def forward(self, x):
        x = x + 1
        print("between two graphs")
        return x * 2


class Plain(nn.Module):
    def forward(self, x):
        return x * 2


class Halves(nn.Module):
    """A model that requires a separate graph for each size, even with dynamic shapes."""

    def forward(self, x):
        return x * int(x.shape[0])


def line(kind, offset):
    return f"{__file__}:{kind.forward.__code__.co_firstlineno + offset}"


def compiled(kind, **given):
    module = kind()
    module.compile(backend="eager", **given)
    return module


def reported(work):
    report = CompileReport()
    work()
    return report.lines()


def test_report_without_problems_is_one_line():
    module = compiled(Plain)
    lines = reported(lambda: [module(torch.ones(n)) for n in (2, 2, 3, 4)])
    assert lines == ["torch.compile: 2 graphs, no graph breaks, 1 recompile"]


def test_graph_break_is_reported_with_its_line():
    module = compiled(Printing)
    assert reported(lambda: module(torch.ones(2))) == [
        "torch.compile: 2 graphs, 1 graph break, no recompiles",
        f'  graph break: {line(Printing, 2)}: `print("between two graphs")`: Failed to trace builtin operator',
    ]


def test_unexpected_recompiles_are_reported_with_their_cause():
    module = compiled(Halves, dynamic=False)
    few = reported(lambda: [module(torch.ones(n)) for n in range(2, 7)])
    assert few == ["torch.compile: 5 graphs, no graph breaks, 4 recompiles"]
    torch._dynamo.reset()
    many = reported(lambda: [module(torch.ones(n)) for n in range(2, 9)])
    assert many[0] == "torch.compile: 7 graphs, no graph breaks, 6 recompiles (2 more than expected)"
    assert len(many) == 7
    assert (
        f"  recompiled: {line(Halves, 0)} forward: tensor 'x' size mismatch at index 0. expected 7, actual 8"
        in many
    )


def test_recompile_limit_is_reported():
    module = compiled(Halves, dynamic=False)
    lines = reported(lambda: [module(torch.ones(n)) for n in range(2, 14)])
    assert lines[-1] == (
        "  recompile limit reached, so later calls ran eagerly: tensor 'x' size mismatch at index 0. "
        "expected 9, actual 10"
    )


def test_only_compilations_since_the_start_count():
    module = compiled(Printing)
    module(torch.ones(2))
    again = reported(lambda: module(torch.ones(2)))
    assert again == ["torch.compile: no graphs, no graph breaks, no recompiles"]
    counts, *problems = reported(lambda: module(torch.ones(3)))
    assert "1 graph break, 2 recompiles" in counts  # one before the graph break, one after it
    assert len(problems) == 1


# ---- failed compilation -------------------------------------------------------------------------------


def failure(kind, *args, **given):
    module = kind()
    module.compile(**{"backend": "eager", "fullgraph": True, **given})
    try:
        module(*args)
    except Exception as error:
        return error
    raise AssertionError("the compilation raised no error")


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Printing())

    def forward(self, x):
        return self.inner(x)


def test_failure_names_the_line_of_user_code_inside_torch_modules():
    expected = f'at {line(Printing, 2)}: `print("between two graphs")`'
    assert explain_failure(failure(Outer, torch.ones(2))) == (
        f"Unsupported: Failed to trace builtin operator, {expected}"
    )


def test_failure_for_wrong_strides_in_torch_is_explained():
    net, x = nn.Linear(6, 5), torch.randn(3, 4, 6)
    module = torch.compile(
        lambda: nn.functional.dropout(net(x), 0.1).transpose(1, 2).contiguous().sin(), backend="aot_eager"
    )
    with pytest.raises(RuntimeError) as raised:
        module().sum().backward()
    assert "use the backend inductor" in explain_failure(raised.value)
