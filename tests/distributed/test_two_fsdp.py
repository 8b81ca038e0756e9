"""A sharded model in two processes gives the same results as one process with the whole batch."""

import pytest
import torch
from sharded_runs import ACCUMULATED, ADAMW, FSDP, SGD, Net, Record, assert_same, make, train
from two_processes import run_in_two

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

AMP = dict(SGD, type="AmpOptimWrapper", dtype="bfloat16")


def sgd(folder, world=2):
    return train(folder, FSDP if world > 1 else None, world=world)


def adamw_with_average(folder, world=2):
    return train(folder, FSDP if world > 1 else None, world=world, optim=ADAMW, ema=True)


def accumulated(folder, world=2):
    return train(folder, FSDP if world > 1 else None, world=world, optim=ACCUMULATED)


def clipped_by_value(folder, world=2):
    optim = dict(SGD, clip_grad=dict(type="value", clip_value=0.02))
    return train(folder, FSDP if world > 1 else None, world=world, optim=optim)


def autocast(folder):
    return [train(folder / kind, kind, world=2, optim=AMP) for kind in ("fsdp2", "ddp")]


def sync_bn(folder, world=2):
    cfg = dict(parallel=FSDP, sync_bn="torch") if world > 1 else None
    return train(folder, world=world, model=Net(norm=True), cfg=cfg)


def compiled(folder):
    return train(folder, world=2, cfg=dict(parallel=FSDP, compile=dict(backend="aot_eager")))


def lower_precision(folder):
    model, seen = Net(norm=True), []
    for part in (model.norm, model.head):
        part.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    runner = make(folder, dict(FSDP, param_dtype="bf16"), world=2, model=model, optim=ACCUMULATED)
    runner.train()
    losses = next(hook for hook in runner.hooks if isinstance(hook, Record)).losses
    exact = train(folder / "exact", FSDP, world=2, model=Net(norm=True), optim=ACCUMULATED)["losses"]
    return seen[:2], {p.dtype for p in runner.model.parameters()}, torch.stack(losses).float(), exact


def shards(folder):
    torch.manual_seed(torch.distributed.get_rank())
    model = Net()
    own = model.stem.weight.detach().clone()  # random values, different on each rank
    runner = make(folder, FSDP, world=2, model=model)
    blocks = [name for name, module in runner.model.named_modules() if hasattr(type(module), "unshard")]
    sizes = {name: p.to_local().shape[0] for name, p in model.named_parameters()}
    return blocks, sizes, runner.model.forward_needs_all_ranks, own, model.stem.weight.full_tensor().detach()


FUNCTIONS = [
    sgd, adamw_with_average, accumulated, clipped_by_value, autocast, sync_bn, compiled,
    lower_precision, shards,
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two(FUNCTIONS, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("function", [sgd, adamw_with_average, accumulated, clipped_by_value, sync_bn])
def test_losses_norms_validation_results_and_weights_match_one_process(answers, function, tmp_path):
    first, second = answers[function.__name__]
    assert_same(first, second, steps=20)
    assert first["kind"] == "MMFullyShardedDataParallel"
    assert_same(first, function(tmp_path, world=1), rtol=1e-6, atol=1e-6, steps=20)


def test_autocast_matches_ddp(answers):
    assert isinstance(answers["autocast"][0], list), answers["autocast"][0]
    sharded, replicated = answers["autocast"][0]
    assert_same(sharded, replicated, rtol=1e-3, atol=1e-3, steps=20)


def test_compiled_sharded_model_matches_eager(answers):
    assert_same(answers["compiled"][0], answers["sgd"][0], rtol=1e-6, atol=1e-6)


def test_param_dtype_applies_to_forward_but_not_to_shards_and_batchnorm(answers):
    for answer in answers["lower_precision"]:
        assert not isinstance(answer, str), answer
        (norm, head), stored, losses, exact = answer
        assert norm == (torch.bfloat16, torch.float32)
        assert head == (torch.bfloat16, torch.bfloat16)
        assert stored == {torch.float32}
        torch.testing.assert_close(losses, exact, rtol=0.05, atol=0.03)


def test_wrapped_blocks_are_units_and_ranks_store_only_their_rows(answers):
    assert not isinstance(answers["shards"][0], str), answers["shards"][0]
    rows = []
    for blocks, sizes, needs_all, *_ in answers["shards"]:
        assert blocks == ["module", "module.blocks.0", "module.blocks.1"]
        assert needs_all
        rows.append((sizes["blocks.1.0.weight"], sizes["head.weight"]))
    assert rows == [(3, 1), (2, 0)]


def test_rank_0_broadcasts_its_weights(answers):
    (*_, own, shared), (*_, others, shared_too) = answers["shards"]
    assert not torch.equal(own, others)
    assert torch.equal(shared, own)
    assert torch.equal(shared_too, own)
