"""CheckpointHook: regular, additional and best checkpoints."""

import os

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import Scripted, assert_same, loader, run, scalars, training, validation, weights


def files(folder):
    return {path.name for path in folder.glob("*.pth")}


def trained(folder, values=(), name="acc", epochs=5, resume=False, load_from=None, **options):
    hook = dict(type="CheckpointHook", **options)
    evaluated = validation(Scripted(values, name)) if values else {}
    cfg = dict(by_epoch=True, max_epochs=epochs)
    train = loader(batch_size=20)
    hooks = dict(checkpoint=hook)
    evaluated |= dict(resume=resume, load_from=load_from)
    return run(folder, train_cfg=cfg, train_dataloader=train, default_hooks=hooks, **evaluated)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (dict(interval=2), {2, 4, 5}),
        (dict(interval=2, save_last=False), {2, 4}),
        (dict(interval=-1), {5}),
        (dict(interval=-1, save_last=False), set()),
        (dict(interval=1, max_keep_ckpts=2), {4, 5}),
        (dict(interval=2, max_keep_ckpts=1), {5}),
        (dict(interval=2, save_begin=1), {3, 5}),
    ],
)
def test_checkpoints_are_saved_at_the_epoch_interval(tmp_path, options, numbers):
    trained(tmp_path, **options)
    assert files(tmp_path) == {f"epoch_{n}.pth" for n in numbers}
    assert (tmp_path / "last_checkpoint").exists() == bool(numbers)


def test_run_that_overwrites_checkpoints_of_an_earlier_run_logs_a_warning(tmp_path):
    def log(**options):
        trained(tmp_path, **options)
        return max(tmp_path.glob("*/*.log"), key=os.path.getmtime).read_text()

    warning = "contains checkpoints of an earlier run, such as epoch_1.pth"
    assert warning not in log(epochs=1)
    assert warning not in log(epochs=2, resume=True)
    assert log(epochs=2).count(warning) == 1


@pytest.mark.parametrize("loop", [dict(by_epoch=True, max_epochs=5), dict(by_epoch=False, max_iters=10)])
def test_iteration_interval_of_checkpoints_works_in_both_loops(tmp_path, loop):
    hook = dict(type="CheckpointHook", by_epoch=False, interval=3, max_keep_ckpts=3)
    train = loader(batch_size=20)
    run(tmp_path, train_cfg=loop, train_dataloader=train, default_hooks=dict(checkpoint=hook))
    assert files(tmp_path) == {"iter_6.pth", "iter_9.pth", "iter_10.pth"}
    assert torch.load(tmp_path / "iter_9.pth", weights_only=True)["meta"]["iter"] == 9


def test_out_dir_has_one_folder_per_run_and_supports_resuming(tmp_path):
    out = tmp_path / "out"
    one = trained(tmp_path / "one", interval=5, out_dir=str(out))
    trained(tmp_path / "two", interval=5, out_dir=str(out))
    assert files(out / "one") == files(out / "two") == {"epoch_5.pth"}
    assert files(tmp_path / "one") == set()
    again = run(tmp_path / "one", resume=True, train_cfg=dict(by_epoch=True, max_epochs=5))
    assert_same(weights(one), weights(again))


def test_out_dir_of_another_run_is_refused(tmp_path):
    """The work_dirs have the same name, so their checkpoints would be in the same subfolder of out_dir."""
    out = str(tmp_path / "out")
    trained(tmp_path / "x" / "run", interval=1, epochs=2, out_dir=out)
    before = (tmp_path / "out" / "run" / "epoch_1.pth").read_bytes()
    with pytest.raises(ConfigError, match=r"out_dir: .*out/run contains .* the run in .*x/run, but .*y/run"):
        trained(tmp_path / "y" / "run", interval=1, out_dir=out)
    with pytest.raises(
        ConfigError, match="contains the checkpoints of the run in"
    ):  # a work_dir as the out_dir
        trained(tmp_path / "z" / "run", interval=1, out_dir=str(tmp_path / "x"))
    assert (tmp_path / "out" / "run" / "epoch_1.pth").read_bytes() == before
    moved = (tmp_path / "x").rename(tmp_path / "moved") / "run"
    resumed = trained(moved, interval=1, out_dir=out, epochs=3, resume=True)
    assert_same(weights(resumed), weights(trained(tmp_path / "whole", epochs=3)))


def test_save_epochs_keeps_additional_checkpoints(tmp_path):
    names = dict(filename_tmpl="ckpt_latest.pth", max_keep_ckpts=1)
    trained(tmp_path, interval=1, save_epochs=[1, 4], **names)
    assert files(tmp_path) == {"ckpt_latest.pth", "ckpt_epoch_1.pth", "ckpt_epoch_4.pth"}
    meta = torch.load(tmp_path / "ckpt_epoch_4.pth", weights_only=True)["meta"]
    assert (meta["epoch"], meta["iter"]) == (4, 8)
    assert (tmp_path / "last_checkpoint").read_text().endswith("ckpt_latest.pth")


@pytest.mark.parametrize(
    ("name", "rule", "best"),
    [("coco/bbox_mAP", None, 2), ("val_loss", None, 4), ("x", "less", 4), ("loss", "greater", 2)],
)
@pytest.mark.parametrize("auto", [False, True])
def test_best_checkpoint_follows_the_inferred_or_configured_rule(tmp_path, name, rule, best, auto):
    values = [0.3, 0.9, 0.9, 0.1, 0.5]
    runner = trained(tmp_path, values, name, interval=-1, save_best="auto" if auto else name, rule=rule)
    expected = f"best_{name.replace('/', '_')}_epoch_{best}.pth"
    assert files(tmp_path) == {"epoch_5.pth", expected}
    assert runner.message_hub.get_info(f"best_score/{name}") == values[best - 1]
    assert torch.load(tmp_path / expected, weights_only=True)["meta"]["epoch"] == best


def test_each_metric_has_a_separate_best_checkpoint(tmp_path):
    metrics = [Scripted([0.1, 0.2, 0.3]), Scripted([0.1, 0.2, 0.3], "loss")]
    hook = dict(type="CheckpointHook", save_best=["acc", "loss"])
    cfg = dict(by_epoch=True, max_epochs=3)
    run(tmp_path, train_cfg=cfg, default_hooks=dict(checkpoint=hook), **validation(metrics))
    assert files(tmp_path) == {"epoch_3.pth", "best_acc_epoch_3.pth", "best_loss_epoch_1.pth"}


@pytest.mark.parametrize("rule", ["greater", "less"])
@pytest.mark.parametrize("nan", [float("nan"), torch.tensor(float("nan"))], ids=["float", "tensor"])
def test_nan_is_never_the_best_value_even_if_first_or_after_a_resume(tmp_path, rule, nan):
    better = [nan, 0.3, nan, 0.4 if rule == "greater" else 0.2]
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="x", rule=rule, interval=1))

    def train(values, epochs, **changes):
        cfg = dict(by_epoch=True, max_epochs=epochs)
        return run(
            tmp_path, train_cfg=cfg, default_hooks=hooks, **validation(Scripted(values, "x")), **changes
        )

    train(better[:3], 3)
    assert "best_x_epoch_2.pth" in files(tmp_path)
    # The last checkpoint was written before the last validation, which is repeated.
    runner = train([nan, better[3], nan], 5, resume=True)
    assert {file for file in files(tmp_path) if "best" in file} == {"best_x_epoch_4.pth"}
    assert runner.message_hub.get_info("best_score/x") == better[3]


NAMES = dict(interval=1, filename_tmpl="ckpt_latest.pth", save_best="acc", best_filename="ckpt_best.pth")


def best(folder):
    saved = torch.load(folder / "ckpt_best.pth", weights_only=True)
    return saved["meta"]["epoch"], saved["message_hub"]["runtime_info"]["best_score/acc"]


class Killed(Hook):
    """A hook that raises an exception before or after the validation of an epoch."""

    priority = "LOWEST"

    def __init__(self, epoch, stage):
        self.epoch, self.stage = epoch, stage

    def before_val(self, runner):
        self.end(runner, "before_val")

    def after_val(self, runner):
        self.end(runner, "after_val")

    def end(self, runner, stage):
        if (runner.epoch, stage) == (self.epoch, self.stage):
            raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["before_val", "after_val"])
@pytest.mark.parametrize("epoch", [2, 3])
def test_best_score_is_restored_after_a_kill_around_validation(tmp_path, epoch, stage):
    values = [0.3, 0.9, 0.5, 0.7, 0.95]
    done = values[: epoch if stage == "after_val" else epoch - 1]
    with pytest.raises(KeyboardInterrupt):
        killed(tmp_path, done, [Killed(epoch, stage)])
    assert torch.load(tmp_path / "ckpt_latest.pth", weights_only=True)["meta"]["epoch"] == epoch
    runner = killed(tmp_path, values[epoch - 1 : 4], epochs=4, resume=True)
    assert files(tmp_path) == {"ckpt_latest.pth", "ckpt_best.pth"}
    assert best(tmp_path) == (2, 0.9), "a worse epoch replaced the best checkpoint"
    assert runner.message_hub.get_info("best_score/acc") == 0.9
    killed(tmp_path, values[3:], resume=True)
    assert best(tmp_path) == (5, 0.95), "a better epoch did not replace the best checkpoint"


def killed(folder, values, hooks=(), epochs=5, **changes):
    return run(
        folder,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        train_dataloader=loader(batch_size=20),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", **NAMES)),
        custom_hooks=hooks,
        **validation(Scripted(values)),
        **changes,
    )


def test_after_new_best_is_called_after_the_checkpoint_is_written(tmp_path):
    calls = []

    class RecordsNewBest(Hook):
        def after_new_best(self, runner, metrics):
            calls.append((metrics["acc"], best(tmp_path)))

    killed(tmp_path, [0.3, 0.2, 0.9, 0.9, 0.5], [RecordsNewBest()])
    assert calls == [(0.3, (1, 0.3)), (0.9, (3, 0.9))]


def test_metric_with_ambiguous_name_requires_a_rule(tmp_path):
    with pytest.raises(ConfigError, match=r"^default_hooks.checkpoint.rule: .*'score'"):
        trained(tmp_path, [0.1], "score", save_best="score")
    with pytest.raises(ConfigError, match="'greater' or 'less' or None, not 'more'"):
        trained(tmp_path, [0.1], "score", save_best="score", rule="more")


@pytest.mark.parametrize(
    ("kind", "name", "better"),
    [("MulticlassF1Score", None, "greater"), ("MulticlassCalibrationError", "quality", "less")],
)
@pytest.mark.parametrize("collection", [False, True])
def test_torchmetrics_declares_whether_higher_is_better(tmp_path, kind, name, better, collection):
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = getattr(torchmetrics.classification, kind)(num_classes=3)
    monitor = "/".join(filter(None, (name, kind if collection or not name else "")))
    metric = torchmetrics.MetricCollection([metric]) if collection else metric
    stop = dict(type="EarlyStoppingHook", monitor=monitor, patience=9)
    runner = run(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best=monitor)),
        custom_hooks=[stop],
        **validation(dict(type="TorchMetric", metric=metric, name=name)),
    )
    values = [line[monitor] for line in scalars(runner) if monitor in line]
    assert len(set(values)) > 1
    best = max(values) if better == "greater" else min(values)
    assert runner.message_hub.get_info(f"best_score/{monitor}") == pytest.approx(best)


def test_auto_with_an_ambiguous_metric_name_warns_once_and_saves_regular_checkpoints(tmp_path):
    trained(tmp_path, [0.1, 0.2], "score", epochs=2, save_best="auto")
    assert files(tmp_path) == {"epoch_2.pth"}
    log = next(tmp_path.rglob("*.log")).read_text()
    assert log.count("the metric 'score' does not indicate whether higher values are better") == 1


def test_auto_uses_the_first_metric_that_is_a_number(tmp_path):
    class Named(Scripted):
        def compute_metrics(self, results):
            return {"summary": "0.1 0.2", **super().compute_metrics(results)}

    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="auto"))
    run(tmp_path, default_hooks=hooks, **validation(Named([0.2, 0.1])))
    assert files(tmp_path) == {"best_acc_epoch_1.pth", "epoch_2.pth"}


def test_runner_keeps_the_last_two_checkpoints_and_the_best_by_default(tmp_path):
    run(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=5),
        **validation(Scripted([0.1, 0.3, 0.2, 0.2, 0.2])),
    )
    assert files(tmp_path) == {"best_acc_epoch_2.pth", "epoch_4.pth", "epoch_5.pth"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(filename_tmpl="epoch_{number}.pth"), r"checkpoint\.filename_tmpl: must contain at most one {}"),
        (dict(filename_tmpl="{}_{}.pth"), r"checkpoint\.filename_tmpl: must contain at most one {}"),
        (dict(best_filename="best.pth"), r"checkpoint\.best_filename: .*save_best, not 0"),
        (dict(best_filename="best.pth", save_best=["acc", "loss"]), r"checkpoint\.best_filename: .*not 2"),
        (dict(save_epochs=[3, 0]), r"checkpoint\.save_epochs: .*not 0"),
        (dict(max_keep_best=0), r"checkpoint\.max_keep_best: .*not 0"),
        (dict(best_filename="b.pth", save_best="acc", max_keep_best=2), r"max_keep_best: .*best_filename"),
    ],
)
def test_invalid_file_names_are_rejected_at_construction(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**training(tmp_path, default_hooks=dict(checkpoint=dict(type="CheckpointHook", **options))))


def test_save_epochs_must_match_the_training_loop(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_epochs=[1, 7]))
    with pytest.raises(ConfigError, match=r"checkpoint\.save_epochs: lists epochs"):
        run(tmp_path, train_cfg=dict(by_epoch=False, max_iters=2), default_hooks=hooks)


def test_checkpoints_kept_with_a_higher_limit_are_not_removed(tmp_path):
    trained(tmp_path, interval=1, epochs=3)
    trained(tmp_path, interval=1, epochs=6, max_keep_ckpts=2, resume=True)
    assert files(tmp_path) == {f"epoch_{n}.pth" for n in (1, 2, 3, 5, 6)}


@pytest.mark.parametrize(
    "options", [dict(), dict(best_filename="top/one.pth")], ids=["number", "best_filename"]
)
def test_longer_run_keeps_the_best_checkpoint_of_its_last_validation(tmp_path, options):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc", **options))

    def train(epochs, values, **changes):
        cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=2)
        runner = run(tmp_path, train_cfg=cfg, default_hooks=hooks, **validation(Scripted(values)), **changes)
        return [runner.message_hub.get_info(f"best_{name}/acc") for name in ("score", "ckpt")]

    name = options.get("best_filename")
    train(1, [0.9])  # validates at its end, after the last checkpoint has been written
    assert train(2, [0.9, 0.5], resume=True) == [
        0.9,
        name or "best_acc_epoch_1.pth",
    ]  # repeats the validation
    assert train(3, [0.5, 0.95], resume=True) == [0.95, name or "best_acc_epoch_3.pth"]
    assert len(list(tmp_path.rglob("best_*.pth" if name is None else "one.pth"))) == 1


def test_files_of_another_run_are_not_removed(tmp_path):
    hooks = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2)))
    run(tmp_path / "a", **hooks)
    (tmp_path / "b").mkdir()
    for number in (1, 2):
        (tmp_path / "b" / f"epoch_{number}.pth").write_text("of another run")
    more = dict(train_cfg=dict(by_epoch=True, max_epochs=5))
    run(tmp_path / "b", resume=str(tmp_path / "a" / "epoch_2.pth"), **hooks, **more)
    assert {path.name for path in (tmp_path / "b").glob("*.pth")} == {f"epoch_{n}.pth" for n in (1, 2, 4, 5)}


def test_two_hooks_with_the_same_file_names_raise_an_error(tmp_path):
    first = dict(type="CheckpointHook", interval=1)
    with pytest.raises(ConfigError, match="two CheckpointHooks use the same file names"):
        run(
            tmp_path,
            default_hooks=dict(checkpoint=first),
            custom_hooks=[dict(type="CheckpointHook", interval=1, out_dir=str(tmp_path.parent))],
        )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(max_keep_best=2), [(0.9, 4), (0.8, 2)]),
        (dict(max_keep_best=3, rule="less"), [(0.1, 3), (0.5, 1), (0.6, 5)]),
        (dict(max_keep_best=-1), [(0.9, 4), (0.8, 2), (0.6, 5), (0.5, 1), (0.1, 3)]),
    ],
)
@pytest.mark.parametrize("stop", [0, 3])
def test_best_k_checkpoints_are_kept_and_ranked(tmp_path, options, kept, stop):
    values, hook = [0.5, 0.8, 0.1, 0.9, 0.6], dict(save_best="acc", interval=1, max_keep_ckpts=1, **options)
    if stop:  # the last validation of the first run is repeated
        trained(tmp_path, values[:stop], epochs=stop, **hook)
        values = values[stop - 1 :]
    runner = trained(tmp_path, values, resume=bool(stop), **hook)
    assert files(tmp_path) == {"epoch_5.pth", *(f"best_acc_epoch_{epoch}.pth" for _, epoch in kept)}
    names = [[value, f"best_acc_epoch_{epoch}.pth"] for value, epoch in kept]
    assert runner.message_hub.get_info("best_ckpts/acc") == names
    assert [runner.message_hub.get_info(f"best_{kind}/acc") for kind in ("score", "ckpt")] == names[0]


def test_best_checkpoints_of_another_folder_are_named_by_their_paths(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    hook = dict(save_best="acc", interval=1, max_keep_best=2)
    trained(first, [0.8, 0.5], epochs=2, **hook)
    # The last validation is repeated.
    runner = trained(
        second, [0.5, 0.7, 0.9], epochs=4, load_from=str(first / "epoch_2.pth"), resume=True, **hook
    )
    hub = runner.message_hub
    ranked = [[0.9, "best_acc_epoch_4.pth"], [0.8, str(first / "best_acc_epoch_1.pth")]]
    assert hub.get_info("best_ckpts/acc") == ranked
    assert all((second / name).exists() for _, name in ranked)
    assert files(first) > {"best_acc_epoch_1.pth", "best_acc_epoch_2.pth"}  # not removed


def test_best_checkpoints_within_epochs_are_named_by_iteration_and_resume(tmp_path):
    options = dict(
        train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=0.5),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="acc", max_keep_best=2)),
    )
    values = [0.1, 0.4, 0.7, 0.3, 0.2, 0.6]  # after steps 3, 5, 8, 10, 13 and 15
    average = dict(type="AverageBestHook", metric="acc", count=1)
    whole = run(tmp_path / "a", custom_hooks=[average], **options, **validation(Scripted([*values, 0.0])))
    assert files(tmp_path / "a") >= {"best_acc_iter_8.pth", "best_acc_iter_15.pth"}
    assert files(tmp_path / "a" / "average_best") == {"iter_8.pth"}
    saved = tmp_path / "a" / "best_acc_iter_8.pth"
    resumed = run(tmp_path / "b", resume=str(saved), **options, **validation(Scripted(values[3:])))
    assert_same(weights(whole), weights(resumed))


def test_early_stopping_and_missing_metrics_within_epochs(tmp_path):
    def stopped(**options):
        hook = dict(type="EarlyStoppingHook", **options)
        cfg = dict(by_epoch=True, max_epochs=3, val_interval=0.5)
        return run(
            tmp_path,
            train_cfg=cfg,
            custom_hooks=[hook],
            **validation(Scripted([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])),
        )

    runner = stopped(monitor="acc", stopping_threshold=0.8)
    assert (runner.epoch, runner.iter) == (1, 8)
    with pytest.raises(ConfigError, match=r"^custom_hooks\[0\]\.monitor: unknown metric 'mAP': .*\['acc'\]"):
        stopped(monitor="mAP")
    assert stopped(monitor="mAP", strict=False, patience=9).epoch == 3
