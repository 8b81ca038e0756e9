"""Training with ZeRO-1 in two processes gives the same weights and saved state as the plain optimizer."""

import pytest
import torch
from two_processes import run_in_two
from two_trainings import SteppedNet, train

from slipstream.checkpoint import load_checkpoint

ADAMW = dict(type="AdamW", lr=0.02, weight_decay=0.1)
ZERO = dict(ADAMW, type="ZeroRedundancyOptimizer", optimizer_type="AdamW")
SCHEDULES = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=4),
    dict(type="PolyLR", power=0.9, by_epoch=False, begin=4, end=24),
]


def options(optimizer, **changes):
    optim = dict(
        optimizer=optimizer,
        clip_grad=dict(max_norm=0.3),
        paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"last": dict(lr_mult=10.0)}),
    )
    checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=1))
    return dict(
        optim_wrapper={**optim, **changes}, param_scheduler=SCHEDULES, default_hooks=checkpoints, max_epochs=4
    )


def everything(folder):
    answers = {}
    for name, optimizer in (("plain", ADAMW), ("zero", ZERO)):
        runner = train(folder / name, 2, **options(optimizer))
        answers[name] = {k: v.clone() for k, v in runner.model.module.state_dict().items()}
        answers[f"{name} lr"] = runner.optim_wrapper.get_lr()["lr"]
    answers["inner lr"] = [group["lr"] for group in runner.optim_wrapper.optimizer.optim.param_groups]
    state = runner.optim_wrapper.optimizer.state
    answers["held"] = sum(s["exp_avg"].numel() for s in state.values())
    return answers


def resumed(folder):
    first = folder.parent / "everything" / "zero" / "epoch_2.pth"
    again = train(folder / "again", 2, resume=str(first), **options(ZERO))
    plain = train(folder / "plain", 2, resume=str(first), **options(ADAMW))
    from_one = train(folder / "one", 2, resume=str(folder.parent / "world1" / "epoch_2.pth"), **options(ZERO))
    return [{k: v.clone() for k, v in r.model.module.state_dict().items()} for r in (again, plain, from_one)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    train(folder / "world1", 1, **options(ADAMW))
    return run_in_two([everything, resumed], folder), folder


def both(answers, name):
    for answer in answers[0][name]:
        assert not isinstance(answer, str), answer
    return answers[0][name]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_groups_schedulers_and_clipping_match_the_plain_optimizer(answers):
    start = SteppedNet().state_dict()
    for answer in both(answers, "everything"):
        assert_equal(answer["zero"], answer["plain"])
        assert not torch.equal(answer["zero"]["first.weight"], start["first.weight"])
    first, second = both(answers, "everything")
    assert_equal(first["zero"], second["zero"])


def test_each_rank_stores_about_half_of_the_state_without_overlap(answers):
    first, second = (answer["held"] for answer in both(answers, "everything"))
    whole = sum(p.numel() for p in SteppedNet().parameters())
    assert first + second == whole
    assert max(first, second) <= 0.55 * whole


def test_checkpoint_matches_the_plain_optimizer(answers):
    both(answers, "everything")
    zero, plain = (
        load_checkpoint(answers[1] / "everything" / name / "epoch_4.pth")["optimizer"]
        for name in ("zero", "plain")
    )
    assert list(zero["state"]) == list(plain["state"])
    for number, state in plain["state"].items():
        assert_equal(zero["state"][number], state)
    assert [g["params"] for g in zero["param_groups"]] == [g["params"] for g in plain["param_groups"]]
    for one, other in zip(zero["param_groups"], plain["param_groups"], strict=True):
        assert {key: one[key] for key in other} == other


def test_resumed_run_is_bitwise_equal(answers):
    for whole, (again, plain, _) in zip(both(answers, "everything"), both(answers, "resumed"), strict=True):
        assert_equal(again, whole["zero"])
        assert_equal(plain, whole["zero"])  # the run resumed with the plain optimizer is also equal


def test_run_resumes_with_one_process_and_the_plain_optimizer_or_zero(answers, tmp_path):
    whole = both(answers, "everything")[0]["zero"]
    for name, optimizer in (("plain", ADAMW), ("zero", ZERO)):
        source = str(answers[1] / "everything" / "zero" / "epoch_2.pth")
        runner = train(tmp_path / name, 1, resume=source, **options(optimizer))
        assert_close(runner.model.state_dict(), whole)
