"""Tests of `slipstream compare`: all contenders train identically and take turns, and failed contenders get a row."""

import json
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import tiny_runs
from slipstream.cli.main import main
from slipstream.compare import CONTENDERS, Contender, Work, compare, config_subject, network_subject
from slipstream.compare import measure as module
from slipstream.compare.result import markdown, rows
from slipstream.compare.subject import Batches, model_loss
from slipstream.errors import SlipstreamError, UnknownNameError
from slipstream.tune.process import TrialError

SHORT = dict(steps=2, rounds=2, timeout=300)


def subject(tmp_path, **changes):
    cfg = tiny_runs.training(tmp_path / "never", **changes)
    return config_subject(cfg, "tiny")


def by_name(found):
    return {entry.name: entry for entry in found.entries}


class Recorder:
    """An observer that stores the losses and does not stop the training."""

    def __init__(self):
        self.losses = []

    def after_step(self, loss):
        self.losses.append(loss.item())


def expected_losses(found, steps):
    """Train with plain PyTorch, independently of the contenders."""
    losses = []
    for step in range(steps):
        inputs, targets = found.batches[step % len(found.batches)]
        found.optimizer.zero_grad()
        loss = found.model(inputs, targets, mode="loss")["loss"]
        loss.backward()
        found.optimizer.step()
        losses.append(loss.item())
    return losses


PEERS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(contender.package) is None, reason="not installed"))
    for name, contender in CONTENDERS.items()
    if "compiled" not in name and name != "slipstream_auto"
]


@pytest.mark.parametrize("name", PEERS)
def test_each_contender_trains_like_plain_pytorch(tmp_path, name):
    changes = dict(model=dict(type=tiny_runs.Net, norm=True))
    expected = expected_losses(subject(tmp_path, **changes), 8)
    found, recorder = subject(tmp_path, **changes), Recorder()
    loader = DataLoader(Batches(found.batches, length=8), batch_size=None)
    folder = tmp_path / "files"
    work = Work(found.model, loader, model_loss, lambda net: found.optimizer, str(folder), observer=recorder)
    assert CONTENDERS[name].train(work) > 0
    assert recorder.losses == pytest.approx(expected, rel=1e-5)
    # Batches 1 and 7 are the same, but the weights have changed.
    assert expected[-1] != pytest.approx(expected[1], rel=1e-2)


def test_the_loop_and_slipstream_are_timed_alternately_with_equal_losses(tmp_path):
    found = compare(subject(tmp_path), ["slipstream"], **SHORT)
    assert [entry.name for entry in found.entries] == ["loop", "slipstream"]
    for entry in found.entries:
        assert (entry.status, entry.reason) == ("same losses", "")
        assert len(entry.seconds) == 2
        assert entry.ratio.low <= entry.ratio.ratio <= entry.ratio.high
        assert entry.final_loss == by_name(found)["loop"].final_loss
    assert by_name(found)["loop"].ratio.ratio == 1.0


def test_a_subject_has_the_weights_optimizer_and_first_batches_that_its_configuration_describes(tmp_path):
    loader = tiny_runs.loader(tiny_runs.Noisy(80))
    changes = dict(
        train_dataloader=loader,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.5), clip_grad=dict(max_norm=1)),
    )
    first, second = subject(tmp_path, **changes), subject(tmp_path, **changes)
    assert len(first.batches) == 6
    for one, other in zip(first.batches, second.batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0)
    assert isinstance(first.optimizer, torch.optim.SGD)
    assert first.optimizer.defaults["momentum"] == 0.5
    assert first.samples_per_step == 8
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("batch_size", "expected"), [(16, [16, 16]), (64, [40])])
def test_all_batches_have_the_reported_number_of_samples(tmp_path, batch_size, expected, workers):
    loader = tiny_runs.loader(batch_size=batch_size, num_workers=workers)  # 40 samples
    found = subject(tmp_path, train_dataloader=loader)
    assert [len(inputs) for inputs, _ in found.batches] == expected
    assert found.samples_per_step == expected[0]


@pytest.mark.parametrize(("name", "dims"), [("resnet18_cifar", 1), ("regseg48", 3)])
def test_a_network_is_trained_on_images_of_the_given_size(name, dims):
    found = network_subject(name, (64, 96), 2)
    images, targets = found.batches[0]
    assert images.shape == (2, 3, 64, 96)
    assert targets.dim() == dims
    assert torch.isfinite(model_loss(found.model, found.batches[0]))


def test_batches_repeat_until_the_length_is_reached():
    assert list(Batches(["first", "second"], 3)) == ["first", "second", "first"]


def test_unknown_network_error_names_the_nearest_network():
    with pytest.raises(UnknownNameError, match="did you mean 'regseg48'"):
        network_subject("regseg4")


def halved(work):
    """A contender that trains with half the learning rate."""
    optimizer = work.make_optimizer(work.net)
    optimizer.param_groups[0]["lr"] /= 2
    return CONTENDERS["loop"].train(replace(work, make_optimizer=lambda net: optimizer))


def scaled(work):
    return CONTENDERS["loop"].train(replace(work, loss=lambda net, batch: 1.001 * work.loss(net, batch)))


def broken(work):
    raise ValueError("no such method")


@pytest.mark.parametrize(
    ("train", "status", "reason"),
    [
        (halved, "different losses", "the mean of the first 10 losses by"),
        (scaled, "different losses", "the first loss differs by 0.001 (allowed: 0.0001)"),
        (broken, "failed", "ValueError: no such method"),
    ],
)
def test_a_contender_with_different_losses_or_an_error_is_marked(
    tmp_path, monkeypatch, train, status, reason
):
    monkeypatch.setitem(CONTENDERS, "slipstream", Contender("other", "torch", train))
    lines = []
    hard = subject(tmp_path, optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)))
    found = compare(hard, ["slipstream"], **SHORT, report=lines.append)
    other = by_name(found)["slipstream"]
    assert other.status == status
    assert reason in other.reason
    assert by_name(found)["loop"].status == "same losses"
    (row,) = [row for row in rows(found) if row[0] == "other"]
    assert row[-1] == f"{status}: {other.reason}"
    assert row[-1] in markdown(found, {})


def running(losses, final, seconds=(0.1,)):
    fake = module._Running.__new__(module._Running)
    fake.name, fake.losses, fake.final, fake.seconds = "slipstream", losses, final, list(seconds)
    fake.low_precision, fake.peak_mib = False, 1.0
    return fake


@pytest.mark.parametrize(
    ("final", "reason"),
    [
        (1.09, ""),
        (1.2, "the final loss differs by 0.1 times the first loss"),
        (float("nan"), "the final loss"),
    ],
)
def test_the_final_loss_is_compared_relative_to_the_first(final, reason):
    loop = running([2.0, 1.5], 1.0)
    entry = module._entry(running([2.0, 1.5], final), loop)
    assert entry.reason.startswith(reason)
    assert entry.status == ("different losses" if reason else "same losses")


def test_ratios_are_computed_within_rounds():
    loop, other = running([1.0], 1.0, (2.0, 4.0, 6.0)), running([1.0], 1.0, (1.0, 2.0, 3.0, 99.0))
    entry = module._entry(other, loop)
    assert (entry.ratio.ratio, entry.ratio.low, entry.ratio.high) == (2.0, 2.0, 2.0)
    assert entry.seconds == [1.0, 2.0, 3.0]  # the last round was interrupted


def test_the_row_of_a_contender_that_is_not_installed_contains_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "lightning", Contender("Lightning", "not_there", broken))
    found = compare(subject(tmp_path), ["lightning"], **SHORT)
    entry = by_name(found)["lightning"]
    assert entry.status == "not installed"
    assert entry.reason == "not_there is missing; run: pip install 'slipstream[peers]'"


def test_the_order_rotates_and_a_contender_that_fails_later_is_marked(tmp_path, monkeypatch):
    turns = []

    class Fake:
        def __init__(self, job, make_observer):
            self.name = job.name
            self.ended = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.end()

        def end(self):
            self.ended = True

        def wait_for(self, event, seconds):
            return {"losses": [1.0] * 10, "peak_mib": 1.0}

        def time(self, steps, untimed, seconds):
            turns.append(self.name)
            if self.name == "loop_compiled" and len(turns) > 6:
                raise TrialError("out of memory", "killed")
            return {"seconds": 0.1, "peak_mib": 2.0, "loss": 0.5}

    monkeypatch.setattr(module, "Process", Fake)
    found = compare(SimpleNamespace(name="n", samples_per_step=1), ["loop_compiled", "slipstream"], rounds=3)
    assert turns[:6] == ["loop", "loop_compiled", "slipstream", "loop_compiled", "slipstream", "loop"]
    assert by_name(found)["loop_compiled"].status == "out of memory"
    assert len(by_name(found)["slipstream"].seconds) == 3


def test_ctrl_c_keeps_the_finished_rounds(tmp_path, monkeypatch):
    def stop(self, number):
        if number:
            raise KeyboardInterrupt
        before(self, number)

    before = module._Measurement.round
    monkeypatch.setattr(module._Measurement, "round", stop)
    found = compare(subject(tmp_path), [], **SHORT)
    assert found.stopped == "interrupted"
    assert len(found.entries[0].seconds) == 1
    assert "The measurement is not complete, because it was interrupted." in markdown(found, {})


def test_a_loop_that_does_not_train_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "loop", Contender("loop", "torch", broken))
    with pytest.raises(SlipstreamError, match=r"hand-written loop \(failed\): ValueError: no such method"):
        compare(subject(tmp_path), [], **SHORT)


CONFIG = """
from tiny_runs import Net, loader
model = dict(type=Net)
train_dataloader = loader()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""


def test_the_command_prints_a_table_and_writes_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(CONFIG)
    status = main(
        ["compare", "tiny.py", "--with", "loop", "--steps", "2", "--rounds", "2", "--out", "out", "--trust"]
    )
    assert status == 0
    assert "Slipstream" in capsys.readouterr().out
    document = json.loads((tmp_path / "out/compare.json").read_text())
    assert [entry["name"] for entry in document["entries"]] == ["loop", "slipstream"]
    assert (document["steps"], document["rounds"], document["name"]) == (2, 2, "tiny")
    assert document["torch"] == torch.__version__
    text = (tmp_path / "out/compare.md").read_text()
    assert "| Slipstream |" in text
    assert "n = 2 rounds of 2 steps" in text


def test_unknown_contender_error_suggests_the_nearest_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--with", "lightening"]) == 2
    assert "did you mean 'lightning'" in capsys.readouterr().err
