"""Test that sharded runs resume with any number of processes, and that damaged checkpoints raise errors."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from sharded_runs import ACCUMULATED, ADAMW, FSDP, HSDP, assert_same, make, train
from two_processes import run_in_two

from slipstream.checkpoint import consolidate, find_latest_checkpoint, load_checkpoint, verify_checkpoint
from slipstream.errors import CheckpointError

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

SAVE = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)), optim=ADAMW, ema=True)
BY_ITER = dict(
    optim=ACCUMULATED,
    train_cfg=dict(by_epoch=False, max_iters=10, val_interval=100),
    default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=5)),
    param_scheduler=None,
)


def uninterrupted(folder):
    return train(folder, FSDP, world=2, **SAVE)


def continued(folder):
    first = folder.with_name("uninterrupted") / "epoch_2.sharded"
    return train(folder, FSDP, world=2, **SAVE, resume=str(first))


def continued_as_ddp(folder):
    first = folder.with_name("uninterrupted") / "epoch_2.sharded"
    return train(folder, "ddp", world=2, **SAVE, resume=str(first))


def continued_from_a_file(folder):
    return train(folder, FSDP, world=2, **SAVE, resume=str(folder.with_name("alone") / "epoch_2.pth"))


def middle_of_a_window(folder):
    whole = train(folder, FSDP, world=2, **BY_ITER)
    rest = train(folder / "rest", FSDP, world=2, **BY_ITER, resume=str(folder / "iter_5.sharded"))
    return whole, rest


def files(folder):
    hook = dict(type="CheckpointHook", interval=1, max_keep_ckpts=1, save_best="error", rule="less")
    runner = make(folder, FSDP, world=2, default_hooks=dict(checkpoint=hook))
    runner.train()
    hook = dict(type="CheckpointHook", consolidate=True)
    make(folder / "one", FSDP, world=2, epochs=1, default_hooks=dict(checkpoint=hook)).train()
    latest = find_latest_checkpoint(folder)
    again = make(folder, FSDP, world=2, default_hooks=dict(checkpoint=None), resume=True)
    again.val()  # load only the weights, with strict=True
    hub = runner.message_hub
    names = [sorted(path.name for path in where.iterdir()) for where in (folder, folder / "one")]
    return names[0], latest.name, hub.get_info("best_ckpt/error"), names[1]


FUNCTIONS = [
    uninterrupted, continued, continued_as_ddp, continued_from_a_file, middle_of_a_window, files,
]  # fmt: skip


def hybrid(folder):
    first = folder.with_name("uninterrupted") / "epoch_2.sharded"
    whole = train(folder, HSDP, world=4, **SAVE)
    from_two = train(folder / "two", HSDP, world=4, **SAVE, resume=str(first))
    return whole, from_two


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder):
    return train(folder / "alone", **SAVE)


@pytest.fixture(scope="module")
def answers(folder, alone):
    two = run_in_two(FUNCTIONS, folder, timeout=120)
    return two | run_in_two([hybrid], folder, timeout=120, world=4)


def test_resumed_run_with_the_same_number_of_processes_is_bitwise_equal(answers):
    assert_same(answers["continued"][0], answers["uninterrupted"][0], steps=10)


@pytest.mark.parametrize("name", ["continued_as_ddp", "continued_from_a_file"])
def test_sharded_and_unsharded_runs_load_each_others_checkpoints(answers, alone, name):
    kinds = {"continued_as_ddp": "MMDistributedDataParallel"}
    assert answers[name][0]["kind"] == kinds.get(name, "MMFullyShardedDataParallel")
    assert_same(answers[name][0], alone, rtol=2e-6, atol=1e-6, steps=10)


def test_one_process_resumes_from_the_shards_of_two(answers, alone, folder, tmp_path):
    first = folder / "uninterrupted" / "epoch_2.sharded"
    assert_same(train(tmp_path, **SAVE, resume=str(first)), alone, rtol=2e-6, atol=1e-6, steps=10)


def test_accumulated_gradients_are_restored(answers):
    assert not isinstance(answers["middle_of_a_window"][0], str), answers["middle_of_a_window"][0]
    whole, rest = answers["middle_of_a_window"][0]
    assert_same(rest, whole, rtol=2e-6, atol=1e-6, steps=5)


def test_four_hsdp_processes_match_one_and_resume_from_the_shards_of_two(answers, alone):
    assert not isinstance(answers["hybrid"][0], str), answers["hybrid"][0]
    whole, from_two = answers["hybrid"][0]
    assert_same(whole, alone, rtol=2e-6, atol=1e-6, steps=20)
    assert_same(from_two, alone, rtol=2e-6, atol=1e-6, steps=10)


def flat(value, place=""):
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{place}/{key}").items()}
    return {place: value}


@pytest.mark.parametrize("name", ["uninterrupted", "hybrid"])
def test_consolidated_checkpoint_matches_one_process(answers, folder, tmp_path, name):
    consolidate(folder / name / "epoch_2.sharded", tmp_path / "whole.pth")
    whole = load_checkpoint(tmp_path / "whole.pth")
    ordinary = load_checkpoint(folder / "alone" / "epoch_2.pth")
    assert list(whole) == list(ordinary)
    for part in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
        left, right = flat(whole[part]), flat(ordinary[part])
        assert list(left) == list(right)
        for key, value in left.items():
            torch.testing.assert_close(value, right[key], rtol=1e-6, atol=1e-6, msg=key)


def test_sharded_checkpoints_are_kept_removed_and_found_like_files(answers):
    assert not isinstance(answers["files"][0], str), answers["files"][0]
    names, latest, best, consolidated = answers["files"][0]
    assert [name for name in names if name.endswith((".sharded", ".pth", ".tmp", ".old"))] == [
        best,
        "epoch_4.sharded",
    ]
    assert latest == "epoch_4.sharded"
    assert best.startswith("best_error_epoch_")
    assert "epoch_1.pth" in consolidated
    assert not any(name.endswith(".sharded") for name in consolidated)


# ---- untrusted checkpoints ----------------------------------------------------------------------------


@pytest.fixture
def copy(answers, folder, tmp_path):
    return Path(shutil.copytree(folder / "uninterrupted" / "epoch_2.sharded", tmp_path / "copy.sharded"))


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["BOMB"])),)


def test_pickled_objects_in_shards_raise_an_error(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    torch.save(Bomb(), copy / "rank_0.pth")
    with pytest.raises(CheckpointError, match="contains pickled objects"):
        load_checkpoint(copy)
    assert not (tmp_path / "exploded").exists()


def test_index_with_a_file_outside_the_checkpoint_raises_an_error(copy):
    content = torch.load(copy / "plain.pth", weights_only=True)
    entry = next(iter(content["index"].values()))
    entry["parts"] = [([0, 0], entry["shape"], "../elsewhere")]
    torch.save(content, copy / "plain.pth")
    with pytest.raises(CheckpointError, match="is outside the checkpoint"):
        load_checkpoint(copy)


def test_missing_shard_error_names_the_checkpoint(copy):
    (copy / "rank_1.pth").unlink()
    with pytest.raises(CheckpointError, match=r"copy\.sharded/rank_1\.pth does not exist"):
        load_checkpoint(copy)


def test_flipped_bits_in_shards_raise_an_error(copy):
    damaged = bytearray((copy / "rank_1.pth").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (copy / "rank_1.pth").write_bytes(damaged)
    for read in (load_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match=r"rank_1\.pth is damaged"):
            read(copy)
    verify_checkpoint(copy, part=0, num_parts=2)  # the damaged file is in the other part
