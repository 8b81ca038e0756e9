"""A run with `nan_guard='rollback'` ends in the same state as a run that skips the same batches from the start."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler, TensorDataset

from slipstream.checkpoint import files
from slipstream.checkpoint.integrity import open_verified
from slipstream.errors import NonFiniteLossError
from slipstream.hooks import EMAHook, Hook
from tiny_runs import (
    Net,
    Noisy,
    Scripted,
    assert_same,
    loader,
    run,
    samples,
    validation,
    weights,
)

NAN = math.nan
EPOCHS, ITERS = dict(by_epoch=True, max_epochs=4), dict(by_epoch=False, max_iters=20)


class Breaks(Net):
    """A model with a NaN loss, or a finite loss and a NaN weight gradient, in the calls listed in `broken`.

    The model counts its calls across rollbacks, so a repeated batch does not fail again.
    """

    def __init__(self, broken=(), in_gradient=False, **options):
        super().__init__(**options)
        self.broken, self.in_gradient, self.calls = broken, in_gradient, 0

    def forward(self, inputs, targets, mode):
        out = super().forward(inputs, targets, mode)
        if mode != "loss":
            return out
        self.calls += 1
        if self.calls in self.broken and self.in_gradient:  # 0 * inf in the gradient of sqrt at 0
            out["loss"] = out["loss"] + (self.last.weight[0, 0] * 0).sqrt()
        elif self.calls in self.broken:
            out["loss"] = out["loss"] * NAN
        return out


def saving(interval=1, by_epoch=False, log=4, **options):
    return dict(
        checkpoint=dict(type="CheckpointHook", interval=interval, by_epoch=by_epoch, **options),
        logger=dict(type="LoggerHook", interval=log),
    )


def recovering(folder, interval=3, model=None, guard=None, **changes):
    """Train with a model whose 8th call fails, unless `model` is set."""
    options = dict(
        model=model or Breaks(broken=[8]),
        default_hooks=saving(interval),
        speed=dict(nan_guard=dict(action="rollback", **(guard or {}))),
        train_cfg=EPOCHS,
        log_level="WARNING",
    )
    return run(folder, **{**options, **changes})


def by_hand(skipped, steps=20, window=1, lr_end=10):
    """Train with a plain loop (SGD with momentum, and a linear warm-up) on all batches except those in `skipped`."""
    torch.manual_seed(3)
    net = Net()
    inputs, targets = samples()
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(3 + e)).tolist() for e in range(4)]
    indices = [index for order in orders for index in order]
    for step in range(1, steps + 1):
        optim.param_groups[0]["lr"] = 0.1 * min(1.0, 0.2 + 0.8 * (step - 1) / (lr_end - 1))
        if step not in skipped:
            batch = indices[8 * step - 8 : 8 * step]
            loss = net(inputs[batch], targets[batch], "loss")["loss"]
            (loss / window).backward()
        if step % window == 0:
            if step not in skipped:
                optim.step()
            optim.zero_grad()
    return net.state_dict()


WARM_UP = dict(
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
    param_scheduler=dict(type="LinearLR", start_factor=0.2, end=10, by_epoch=False),
)


@pytest.mark.parametrize(
    ("cfg", "sampler"), [(EPOCHS, "DefaultSampler"), (ITERS, "DefaultSampler"), (ITERS, "InfiniteSampler")]
)
@pytest.mark.parametrize("in_gradient", [False, True])
def test_run_without_the_faulty_batches_matches_a_plain_loop(tmp_path, cfg, sampler, in_gradient):
    torch.manual_seed(3)
    model = Breaks(broken=[8], in_gradient=in_gradient)
    runner = recovering(
        tmp_path, model=model, train_cfg=cfg, train_dataloader=loader(sampler=sampler), **WARM_UP
    )
    # A NaN gradient in step 8 is detected only afterwards, as a NaN weight or as the NaN loss of step 9.
    skipped = {8, 9} if in_gradient else {7, 8}
    assert runner.rollback.skipped == skipped
    assert runner.iter == 20
    expected = by_hand(skipped)
    for name, value in weights(runner).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_the_whole_accumulation_window_with_the_fault_is_skipped(tmp_path):
    torch.manual_seed(3)
    model = Breaks(broken=[12])
    runner = recovering(tmp_path, 5, model, **{**WARM_UP, "speed": dict(nan_guard="rollback", accumulate=2)})
    # The checkpoint of step 10 already contains the preceding window (steps 9 and 10), so only the window with the
    # fault (steps 11 and 12) is skipped.
    assert runner.rollback.skipped == {11, 12}
    expected = by_hand({11, 12}, window=2)
    for name, value in weights(runner).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_pending_gradients_of_a_skipped_window_are_dropped(tmp_path):
    torch.manual_seed(3)
    model = Breaks(broken=[6])
    runner = recovering(tmp_path, 5, model, **{**WARM_UP, "speed": dict(nan_guard="rollback", accumulate=2)})
    assert runner.rollback.skipped == {6}  # the checkpoint contains the gradients of step 5
    expected = by_hand({5, 6}, window=2)
    for name, value in weights(runner).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


class Skip(Hook):
    """A hook that makes the run skip the batches of steps `first` to `last` without a rollback."""

    def __init__(self, first, last):
        self.range = [first, last]

    def before_train(self, runner):
        info = dict(count=0, skipped=[self.range], samples_per_step=runner.samples_per_step)
        runner.message_hub.update_info("rollback", info)
        runner.rollback.load()


def everything(workers=0, cfg=EPOCHS, **changes):
    last = dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater", factor=0.5, patience=0)
    return dict(
        train_dataloader=loader(Noisy(), num_workers=workers, persistent_workers=workers > 0),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.05), clip_grad=dict(max_norm=1.0)),
        param_scheduler=[dict(type="LinearLR", start_factor=0.2, end=9, by_epoch=False), last],
        train_cfg=cfg,
        randomness=dict(seed=3),
        **changes,
    )


def average(runner):
    return next(h for h in runner.hooks if isinstance(h, EMAHook)).ema_model.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("interval", "by_epoch"), [(2, False), (1, True)])
def test_complete_state_is_restored(tmp_path, workers, interval, by_epoch):
    """The runs use dropout, BatchNorm, Adam, EMA, a plateau schedule, early stopping and augmentation."""

    def trained(name, broken, *hooks):
        torch.manual_seed(0)
        stop = dict(type="EarlyStoppingHook", monitor="acc", patience=3, min_delta=0.0)
        return recovering(
            tmp_path / name,
            model=Breaks(broken=broken, dropout=0.3, norm=True),
            custom_hooks=[dict(type="EMAHook", momentum=0.1), stop, *hooks],
            default_hooks=saving(interval, by_epoch, save_best="acc", max_keep_ckpts=2),
            **everything(workers, **validation(Changing())),
        )

    one = trained("one", [13])
    assert one.rollback.skipped == ({13} if not by_epoch else {12, 13})
    other = trained("other", [], Skip(min(one.rollback.skipped), 13))
    assert_same(weights(one), weights(other))
    assert_same(average(one), average(other))
    files = [
        torch.load(tmp_path / n / ("epoch_4.pth" if by_epoch else "iter_20.pth")) for n in ("one", "other")
    ]
    for key in ("optimizer", "param_schedulers"):
        assert str(files[0][key]) == str(files[1][key])
    infos = [f["message_hub"]["runtime_info"] for f in files]
    for key in infos[0].keys() - {"rollback", "experiment_name", "cfg"}:
        assert infos[0][key] == infos[1][key], key
    hubs = [f["message_hub"]["log_scalars"] for f in files]
    assert hubs[0].keys() == hubs[1].keys()
    for key in ("train/loss", "train/lr", "val/acc"):
        assert hubs[0][key] == hubs[1][key], key


class Changing(Scripted):
    """A metric that depends only on the model's outputs, so a repeated validation returns the same value."""

    def __init__(self):
        super().__init__([])

    def process(self, data_batch, data_samples):
        self.results.append(data_samples[0].square().sum().item())

    def compute_metrics(self, results):
        return {"acc": sum(results) % 1.0}


def test_loss_scale_is_restored(tmp_path):
    wrapper = dict(
        type="AmpOptimWrapper",
        dtype="float16",
        loss_scale=dict(init_scale=64.0, growth_interval=3),
        optimizer=dict(type="SGD", lr=0.1),
    )

    def trained(name, broken, *hooks):
        torch.manual_seed(0)
        changes = dict(optim_wrapper=wrapper, custom_hooks=list(hooks))
        return recovering(tmp_path / name, 5, Breaks(broken=broken), **changes)

    one = trained("one", [8])
    other = trained("other", [], Skip(7, 8))
    assert_same(weights(one), weights(other))
    assert one.optim_wrapper.loss_scaler.state_dict() == other.optim_wrapper.loss_scaler.state_dict()
    assert one.optim_wrapper.loss_scaler.get_scale() > 64.0


def test_compiled_run_equals_a_run_without_the_faulty_batches(tmp_path):
    def trained(name, broken, *hooks):
        torch.manual_seed(0)
        speed = dict(nan_guard="rollback", compile=dict(scope="step", backend="eager"), accumulate=2)
        return recovering(
            tmp_path / name,
            4,
            BreaksByInput(broken),
            speed=speed,
            custom_hooks=[dict(type="EMAHook", momentum=0.1), *hooks],
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.05)),
        )

    one = trained("one", 11)
    other = trained("other", 0, Skip(9, 12))
    assert one.rollback.skipped == set(range(9, 13))
    assert one.iter == other.iter == 20
    for mine, yours in ((weights(one), weights(other)), (average(one), average(other))):
        for name, value in mine.items():
            torch.testing.assert_close(value, yours[name], rtol=1e-5, atol=1e-6, msg=name)


class BreaksByInput(Net):
    """A model whose loss is NaN in step `broken`. A data preprocessor hook counts the steps outside the graph."""

    def __init__(self, broken):
        super().__init__()
        self.broken, self.calls = broken, 0
        self.data_preprocessor.register_forward_pre_hook(self.count)

    def count(self, module, args):
        batch, training = args
        self.calls += training
        if training and self.calls == self.broken:
            return ([batch[0] * NAN, batch[1]], training)
        return None


def bad_sample(index=17):
    inputs, targets = samples()
    inputs = inputs.clone()
    inputs[index, 0] = NAN
    return TensorDataset(inputs, targets)


@pytest.mark.parametrize("compile", [None, dict(scope="step", backend="eager")])
def test_bad_sample_is_skipped_in_each_epoch(tmp_path, compile):
    torch.manual_seed(0)
    runner = recovering(
        tmp_path,
        2,
        Net(),
        dict(max_rollbacks=4),
        train_dataloader=loader(bad_sample()),
        speed=dict(nan_guard=dict(action="rollback", max_rollbacks=4), compile=compile),
    )
    assert all(value.isfinite().all() for value in weights(runner).values())
    assert runner.message_hub.get_info("rollback")["count"] == 4
    log = next(tmp_path.glob("*/*.log")).read_text()
    lines = [line for line in log.splitlines() if "contains samples" in line]
    faults = [
        int(line.rsplit("became nan at iteration ")[1].split(".")[0])
        for line in log.splitlines()
        if "rollback" in line
    ]
    assert len(faults) == 4
    for fault in faults:
        (line,) = [line for line in lines if f"The batch of iteration {fault} contains" in line]
        assert " 17" in line.split("contains")[1]


def test_run_without_a_checkpoint_stops_and_reports_the_cause(tmp_path, capsys):
    with pytest.raises(
        NonFiniteLossError, match=r"'loss' became nan at iteration 1\..*no complete checkpoint before"
    ):
        recovering(tmp_path, model=Breaks(broken=[1]))
    incomplete = saving(1, save_optimizer=False)
    with pytest.raises(NonFiniteLossError, match="there is no complete checkpoint before iteration 5"):
        recovering(tmp_path / "b", model=Breaks(broken=[5]), default_hooks=incomplete)
    assert "no CheckpointHook saves complete checkpoints" in capsys.readouterr().out


def test_checkpoint_of_an_earlier_run_in_the_folder_is_not_used(tmp_path):
    run(tmp_path, train_cfg=EPOCHS, default_hooks=saving(1))
    with pytest.raises(NonFiniteLossError, match="no complete checkpoint"):
        recovering(tmp_path, 100, Breaks(broken=[19]))


def test_run_stops_after_max_rollbacks(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"nan at iteration .*number of rollbacks has been reached .max_rollbacks=2"
    ):
        recovering(tmp_path, 1, Breaks(broken=range(8, 100)), dict(max_rollbacks=2))


def test_checkpoint_is_read_once(tmp_path, monkeypatch):
    read = []

    def reading(path, **options):
        read.append(path)
        return open_verified(path, **options)

    monkeypatch.setattr(files, "open_verified", reading)
    recovering(tmp_path)
    assert read == [tmp_path / "iter_6.pth"]


def test_damaged_checkpoint_is_not_used_as_the_last_good_one(tmp_path):
    class Damage(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter + 1 == 7:
                runner.wait_for_checkpoint()
                path = tmp_path / "iter_6.pth"
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 255
                path.write_bytes(content)

    runner = recovering(tmp_path, custom_hooks=[Damage()])
    log = next(tmp_path.glob("*/*.log")).read_text()
    assert "iter_6.pth" in log.split("trying an earlier checkpoint")[0]
    assert "Rolling back to " + str(tmp_path / "iter_3.pth") in log
    assert runner.rollback.skipped == {7, 8}


def test_skip_before_skips_more_batches_and_uses_an_earlier_checkpoint(tmp_path):
    runner = recovering(tmp_path, 3, Breaks(broken=[11]), dict(skip_before=4))
    assert runner.rollback.skipped == set(range(6, 12))
    assert "iter_3.pth (iteration 3;" in next(tmp_path.glob("*/*.log")).read_text()


def test_resumed_run_skips_the_same_batches(tmp_path):
    def trained(name, broken, **changes):
        torch.manual_seed(0)
        return recovering(tmp_path / name, 1, Breaks(broken=broken), guard=dict(skip_before=3), **changes)

    whole = trained("whole", [8])
    assert whole.rollback.skipped == {4, 5, 6, 7, 8}

    class Stop(Hook):
        priority = "LOWEST"

        def after_skipped_iter(self, runner, batch_idx):
            if runner.iter + 1 == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained("part", [8], custom_hooks=[Stop()])
    resumed = trained("part", [], resume=True)
    assert resumed.rollback.skipped == whole.rollback.skipped
    assert resumed.message_hub.get_info("rollback")["count"] == 1
    assert_same(weights(resumed), weights(whole))


def test_damaged_list_of_rollbacks_is_ignored(tmp_path, capsys):
    recovering(tmp_path, 1)
    path = tmp_path / "iter_20.pth"
    content = torch.load(path)
    content["message_hub"]["runtime_info"]["rollback"]["skipped"] = [[3, 1], "x"]
    torch.save(content, path)
    longer = dict(by_epoch=True, max_epochs=5)
    runner = recovering(tmp_path, 1, Breaks(), resume=True, train_cfg=longer)
    assert runner.rollback.skipped == frozenset()
    assert "list of rollbacks is damaged" in capsys.readouterr().out


def test_losses_of_the_last_steps_are_checked_before_the_run_ends(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False, save_last=False))
    runner = recovering(
        tmp_path,
        model=Breaks(broken=[20]),
        default_hooks={**hooks, "logger": dict(type="LoggerHook", interval=100)},
    )
    assert runner.rollback.skipped == {19, 20}
    assert runner.iter == 20


def test_stopped_and_skipping_runs_name_the_samples(tmp_path):
    with pytest.raises(NonFiniteLossError) as stopped:
        run(tmp_path / "stop", train_dataloader=loader(bad_sample(), shuffle=False))
    note = "(the batch of iteration 3 contains samples 16, 17, 18, 19, 20, 21, 22, 23)"
    assert note in stopped.value.__notes__
    run(tmp_path / "skip", train_dataloader=loader(bad_sample(), shuffle=False), speed=dict(nan_guard="skip"))
    log = next((tmp_path / "skip").glob("*/*.log")).read_text()
    assert "iteration 3 is not finite; its batch contains samples 16, 17, 18, 19, 20, 21, 22, 23" in log
    assert "iteration 8 is not finite; its batch contains samples 16, 17" in log


class Huge(Net):
    """A model whose weights become huge but finite after an update with a batch that contains 777."""

    def forward(self, inputs, targets, mode):
        out = super().forward(inputs, targets, mode)
        if mode == "loss" and (inputs == 777).any():
            out["loss"] = out["loss"] + sum((w - w.detach()).sum() for w in self.parameters()) * 1e38
        return out


def with_huge_update(folder, interval):
    """Train on data for which the update of step 9 causes a fault in step 10."""
    inputs, targets = samples(160)
    inputs[64, 0] = 777
    data = TensorDataset(inputs, targets)
    return recovering(folder, interval, Huge(), train_cfg=ITERS, train_dataloader=loader(data, shuffle=False))


def test_checkpoint_with_the_bad_update_is_not_restored_again(tmp_path):
    runner = with_huge_update(tmp_path, 3)
    log = next(tmp_path.glob("*/*.log")).read_text()
    targets = [
        line.split(" (iteration ")[1].split(";")[0] for line in log.splitlines() if "Rolling back" in line
    ]
    assert targets == ["9", "6"]  # iter_9.pth contains the update of step 9
    assert runner.rollback.skipped == {9, 10, 11}
    assert runner.iter == 20
    assert all(value.abs().max() < 1e6 for value in weights(runner).values())


def test_run_stops_if_all_checkpoints_contain_the_bad_update(tmp_path):
    with pytest.raises(NonFiniteLossError, match="maximum number of rollbacks has been reached"):
        with_huge_update(tmp_path, 9)


class Grows(Breaks):
    """A model with a non-persistent buffer that grows in the first call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, inputs, targets, mode):
        if len(self.cache) < 4:
            self.cache = torch.arange(4.0)
        assert self.cache.tolist() == [0, 1, 2, 3]
        return super().forward(inputs, targets, mode)


def test_buffer_whose_shape_changed_is_replaced(tmp_path):
    runner = recovering(tmp_path, model=Grows(broken=[8]))
    assert runner.rollback.skipped == {7, 8}


def test_overwritten_checkpoint_does_not_count_as_an_earlier_one(tmp_path):
    hooks = saving(3)
    hooks["checkpoint"]["filename_tmpl"] = "latest.pth"
    runner = recovering(tmp_path, 3, Breaks(broken=[11]), dict(skip_before=4), default_hooks=hooks)
    assert "latest.pth (iteration 9;" in next(tmp_path.glob("*/*.log")).read_text()
    assert runner.rollback.skipped == {10, 11}


def overflowing(index=17):
    """Return samples, one of which makes a running variance infinite while the loss stays finite."""
    inputs, targets = samples()
    inputs = inputs.clone()
    inputs[index] = 1e25
    return TensorDataset(inputs, targets)


def test_infinite_batchnorm_statistics_are_never_saved(tmp_path):
    """The loss stays finite, because it is computed with the statistics of the batch."""
    with pytest.raises(
        NonFiniteLossError, match=r"running statistic 'norm\.running_var' is NaN or infinite at iteration 4\."
    ):
        run(
            tmp_path,
            model=Net(norm=True),
            train_dataloader=loader(overflowing(), shuffle=False),
            default_hooks=saving(2),
        )
    saved = torch.load(tmp_path / "iter_2.pth")["state_dict"]
    assert all(value.isfinite().all() for value in saved.values())
    assert not (tmp_path / "iter_4.pth").exists()


def test_all_batches_since_the_checkpoint_are_skipped_if_a_statistic_is_infinite(tmp_path):
    """The fault is found only when a checkpoint is written, so each of these batches may have caused it."""
    runner = recovering(
        tmp_path,
        2,
        Net(norm=True),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        train_dataloader=loader(overflowing(), shuffle=False),
    )
    assert runner.rollback.skipped == {3, 4}
    assert runner.iter == 5
    assert all(value.isfinite().all() for value in weights(runner).values())


class OwnState(Sampler):
    """A sampler that draws from its own generator, or starts at a position that it stores."""

    def __init__(self, generator=None):
        self.rng, self.position = generator, 0

    def __iter__(self):
        if self.rng is None:
            self.position += 3
            return iter([(index + self.position) % 40 for index in range(40)])
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(40, generator=self.rng).tolist())
        order = list(range(40))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self):
        return 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.RandomState(5),
        lambda: torch.Generator().manual_seed(5),
    ],
)
def test_generator_of_a_user_defined_sampler_is_restored(tmp_path, make):
    def trained(name, broken, *hooks):
        torch.manual_seed(0)
        data = dict(batch_size=8, dataset=TensorDataset(*samples()), sampler=OwnState(make()))
        return recovering(
            tmp_path / name, 5, Breaks(broken=broken), train_dataloader=data, custom_hooks=list(hooks)
        )

    one, other = trained("one", [12]), trained("other", [], Skip(11, 12))
    assert_same(weights(one), weights(other))
    assert "keeps state" not in next((tmp_path / "one").glob("*/*.log")).read_text()


def test_warning_names_sampler_state_that_cannot_be_restored(tmp_path):
    data = dict(batch_size=8, dataset=TensorDataset(*samples()), sampler=OwnState())
    recovering(tmp_path, train_dataloader=data)
    log = next(tmp_path.glob("*/*.log")).read_text()
    assert log.count("sampler keeps state that cannot be restored (OwnState.position)") == 1
