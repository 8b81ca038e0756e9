"""Repeated blocks are compiled once, in place, and match eager blocks."""

import copy

import pytest
import torch
from compiled_nets import Backend, Block, Tower, raises
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from slipstream.model.blocks import find_blocks
from slipstream.speed.compile import CompileOptions
from slipstream.speed.compile_report import CompileReport
from slipstream.speed.compiled_modules import compile_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # reset torch's count of recompiles, which accumulates across tests
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fit(model, width=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = model(torch.randn(4, width, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(torch.ones(4, width)).sum()]
    return losses


def test_equal_blocks_share_graphs_and_match_eager():
    model, counting = Tower([4] * 6), Backend()
    eager, keys = copy.deepcopy(model), list(model.state_dict())
    compile_model(model, CompileOptions(counting, scope="block"), pytest.fail)
    torch.testing.assert_close(fit(model), fit(eager))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert list(model.state_dict()) == keys
    assert counting.graphs == 2  # one for training, one for validation
    assert counting.calls == 6 * 6
    assert model._compiled_call_impl is None


def test_blocks_of_many_widths_remain_compiled():
    widths = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    model, counting, warnings = Tower(widths), Backend(), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(counting, scope="block", dynamic=False), warnings.append)
    report = CompileReport()
    torch.testing.assert_close(fit(model), fit(eager))
    assert len(report.lines()) == 1  # nothing reduced the speed
    assert warnings == []
    assert counting.calls == 6 * len(widths)


def test_failed_block_makes_all_blocks_of_its_class_run_eagerly():
    model, warnings = Tower([4] * 3), []
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(raises, scope="block"), warnings.append)
    torch.testing.assert_close(fit(model), fit(eager))
    assert len(warnings) == 1
    assert warnings[0].startswith("Block cannot be compiled (")


@pytest.fixture
def alone(tmp_path):
    """Create a process group with one process."""
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_find_blocks_match_eager_with_ddp_and_fsdp(wrapper):
    model, counting = Tower([4] * 3), Backend()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(counting, scope="block"), pytest.fail)
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else model
    if wrapper == "fsdp2":
        for part in (*model.blocks, model):
            fully_shard(part)
    torch.testing.assert_close(fit(wrapped), fit(eager))
    assert list(model.state_dict()) == list(eager.state_dict())
    assert counting.calls == 6 * 3


def stages():
    stage = [nn.Sequential(Block(4), Block(4)) for _ in range(2)]
    return nn.ModuleDict({"stages": nn.Sequential(*stage), "neck": nn.Sequential(Block(4))})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),
        (["Block"], ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "neck.0"]),
        (["stages.?"], ["stages.0", "stages.1"]),
        (["stages.1", "stages.1.0", "neck.0"], ["stages.1", "neck.0"]),  # stages.1 contains stages.1.0
    ],
)
def test_blocks_are_found_by_name_class_or_repetition(names, expected):
    model = stages()
    blocks = find_blocks(model, names, "compile.blocks", containers=False)
    assert [name for name, module in model.named_modules() if module in blocks] == expected
