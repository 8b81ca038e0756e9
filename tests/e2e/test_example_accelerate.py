"""Tests of the examples with a custom loop: with and without compilation, and in two processes."""

import re

import pytest

from ports import free_port

LINE = re.compile(r"epoch (\d)  loss (\S+)  accuracy (\S+)")


def epochs(text):
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in LINE.findall(text)]


@pytest.fixture
def example(root):
    return str(root / "examples/accelerate.py")


@pytest.mark.slow
def test_example_gives_similar_results_with_and_without_compilation(run, example):
    plain = epochs(run(example, "--epochs", "3").stdout)
    done = run(example, "--epochs", "3", "--compile")
    compiled = epochs(done.stdout)
    assert [epoch for epoch, *_ in plain] == [1, 2, 3]
    assert plain[-1][2] > 0.95
    for mine, theirs in zip(compiled, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)
    assert "cannot be compiled as one graph" not in done.stderr


@pytest.mark.slow
def test_example_trains_in_two_processes(run, example):
    launch = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    )
    found = epochs(run(*launch, example, "--epochs", "6").stdout)
    assert [epoch for epoch, *_ in found] == [1, 2, 3, 4, 5, 6]  # only rank 0 prints
    assert found[-1][2] > 0.9


@pytest.mark.slow
def test_example_with_transformers_trains_as_one_graph(run, root):
    pytest.importorskip("transformers")
    example = str(root / "examples/transformers_bert/train.py")
    plain = epochs(run(example, "--epochs", "2").stdout)
    done = run(example, "--epochs", "2", "--compile")
    assert plain[-1][2] > 0.6
    assert epochs(done.stdout)[0] == pytest.approx(plain[0], rel=0.05)
    assert "step: compiled as one graph" in done.stdout
