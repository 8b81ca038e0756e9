"""Which checkpoints are written, kept, and called the best."""

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.runner import Runner
from tiny_runs import Scripted, assert_same, loader, run, training, validation, weights


def files(folder):
    return {path.name for path in folder.glob("*.pth")}


def trained(folder, values=(), name="acc", epochs=5, **options):
    hook = dict(type="CheckpointHook", **options)
    evaluated = validation(Scripted(values, name)) if values else {}
    cfg = dict(by_epoch=True, max_epochs=epochs)
    train = loader(batch_size=20)
    return run(
        folder, train_cfg=cfg, train_dataloader=train, default_hooks=dict(checkpoint=hook), **evaluated
    )


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
def test_by_epochs(tmp_path, options, numbers):
    trained(tmp_path, **options)
    assert files(tmp_path) == {f"epoch_{n}.pth" for n in numbers}
    assert (tmp_path / "last_checkpoint").exists() == bool(numbers)


@pytest.mark.parametrize("loop", [dict(by_epoch=True, max_epochs=5), dict(by_epoch=False, max_iters=10)])
def test_by_iterations_in_both_loops(tmp_path, loop):
    hook = dict(type="CheckpointHook", by_epoch=False, interval=3, max_keep_ckpts=3)
    train = loader(batch_size=20)
    run(tmp_path, train_cfg=loop, train_dataloader=train, default_hooks=dict(checkpoint=hook))
    assert files(tmp_path) == {"iter_6.pth", "iter_9.pth", "iter_10.pth"}
    assert torch.load(tmp_path / "iter_9.pth", weights_only=True)["meta"]["iter"] == 9


def test_out_dir_has_a_folder_for_each_run_and_resuming_finds_it(tmp_path):
    out = tmp_path / "out"
    one = trained(tmp_path / "one", interval=5, out_dir=str(out))
    trained(tmp_path / "two", interval=5, out_dir=str(out))
    assert files(out / "one") == files(out / "two") == {"epoch_5.pth"}
    assert files(tmp_path / "one") == set()
    again = run(tmp_path / "one", resume=True, train_cfg=dict(by_epoch=True, max_epochs=5))
    assert_same(weights(one), weights(again))


def test_the_name_is_a_template(tmp_path):
    trained(tmp_path, interval=5, filename_tmpl="after_{}.pth")
    assert files(tmp_path) == {"after_5.pth"}


def test_what_a_checkpoint_holds_can_be_reduced(tmp_path):
    trained(tmp_path, interval=5, save_optimizer=False, save_param_scheduler=False)
    assert {"optimizer", "param_schedulers"}.isdisjoint(
        torch.load(tmp_path / "epoch_5.pth", weights_only=True)
    )


@pytest.mark.parametrize(
    ("name", "rule", "best"),
    [
        ("acc", None, 2),
        ("mIoU", None, 2),
        ("coco/bbox_mAP", None, 2),
        ("val_loss", None, 4),
        ("x", "greater", 2),
        ("x", "less", 4),
        ("loss", "greater", 2),
    ],
)
@pytest.mark.parametrize("auto", [False, True])
def test_the_best_is_kept_by_the_rule_of_its_name_or_the_one_given(tmp_path, name, rule, best, auto):
    values = [0.3, 0.9, 0.9, 0.1, 0.5]
    runner = trained(tmp_path, values, name, interval=-1, save_best="auto" if auto else name, rule=rule)
    expected = f"best_{name.replace('/', '_')}_epoch_{best}.pth"
    assert files(tmp_path) == {"epoch_5.pth", expected}
    assert runner.message_hub.get_info(f"best_score/{name}") == values[best - 1]
    assert torch.load(tmp_path / expected, weights_only=True)["meta"]["epoch"] == best


def test_several_metrics_have_a_best_each(tmp_path):
    metrics = [Scripted([0.1, 0.2, 0.3]), Scripted([0.1, 0.2, 0.3], "loss")]
    hook = dict(type="CheckpointHook", save_best=["acc", "loss"])
    cfg = dict(by_epoch=True, max_epochs=3)
    run(tmp_path, train_cfg=cfg, default_hooks=dict(checkpoint=hook), **validation(metrics))
    assert files(tmp_path) == {"epoch_3.pth", "best_acc_epoch_3.pth", "best_loss_epoch_1.pth"}


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path):
    trained(tmp_path, [float("nan"), 0.2, float("inf")], interval=-1, save_best="acc", epochs=3)
    assert files(tmp_path) == {"epoch_3.pth", "best_acc_epoch_2.pth"}


def test_in_an_iteration_based_run_the_best_is_called_by_its_iteration(tmp_path):
    hook = dict(type="CheckpointHook", by_epoch=False, interval=100, save_best="acc")
    cfg = dict(by_epoch=False, max_iters=6, val_interval=2)
    metric = Scripted([0.1, 0.5, 0.4])
    run(tmp_path, train_cfg=cfg, default_hooks=dict(checkpoint=hook), **validation(metric))
    assert files(tmp_path) == {"iter_6.pth", "best_acc_iter_4.pth"}
    assert torch.load(tmp_path / "best_acc_iter_4.pth", weights_only=True)["meta"]["iter"] == 4


def test_a_validation_outside_of_training_writes_nothing(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc"))
    runner = Runner(**training(tmp_path, default_hooks=hooks, **validation(Scripted([0.9]))))
    runner.val()
    assert files(tmp_path) == set()


def test_a_name_that_tells_no_rule_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"^default_hooks.checkpoint.rule: .*'score'"):
        trained(tmp_path, [0.1], "score", save_best="score")
    with pytest.raises(ConfigError, match=r"^default_hooks.checkpoint.rule: .*'score'"):
        trained(tmp_path, [0.1], "score", save_best="auto")
    with pytest.raises(ConfigError, match="'greater' or 'less', not 'more'"):
        trained(tmp_path, [0.1], "score", save_best="score", rule="more")
