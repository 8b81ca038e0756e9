"""`resume=True` continues from the newest intact checkpoint of the folder's last run."""

import os
import shutil

import pytest
import torch

from slipstream.errors import CheckpointError
from tiny_runs import (
    Net,
    assert_same,
    run,
    weights,
)


def damage(path):
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_resume_without_a_checkpoint_starts_a_new_run(tmp_path):
    assert_same(weights(run(tmp_path / "a", resume=True)), weights(run(tmp_path / "b")))


@pytest.mark.parametrize("problem", ["damaged", "truncated", "deleted", "pointer deleted"])
def test_resume_uses_the_newest_intact_checkpoint(tmp_path, problem):
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))  # keeps all checkpoints
    three = dict(train_cfg=dict(by_epoch=True, max_epochs=3), default_hooks=hooks)
    whole = run(tmp_path / "whole", **three)
    folder = tmp_path / "parts"
    run(folder, default_hooks=hooks)  # two epochs
    newest = folder / "epoch_2.pth"
    if problem == "damaged":
        damage(newest)
    elif problem == "truncated":
        newest.write_bytes(newest.read_bytes()[:2000])
    elif problem == "deleted":
        newest.unlink()
    else:
        (folder / "last_checkpoint").unlink()
    before = {path.name for path in folder.glob("*.pth")}
    resumed = run(folder, **three, resume=True)
    log = next(path for path in sorted(folder.rglob("*.log"), reverse=True)).read_text()
    epoch, iteration = (2, 10) if problem == "pointer deleted" else (1, 5)
    named = "last_checkpoint" if "deleted" in problem else str(newest)
    assert named in log
    assert (
        f"Resuming from {folder}/epoch_{epoch}.pth; all steps after iteration {iteration} will be repeated"
        in log
    )
    assert_same(weights(whole), weights(resumed))
    assert before <= {path.name for path in folder.glob("*.pth")}


@pytest.mark.parametrize("problem", ["damaged", "deleted", "origin deleted"])
def test_resume_uses_the_highest_iteration_of_the_run_regardless_of_file_times(tmp_path, problem, capsys):
    """The folder also contains checkpoints of later iterations, from an earlier run and from another model."""
    options = dict(
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)), log_level="WARNING"
    )
    four = dict(train_cfg=dict(by_epoch=True, max_epochs=4))
    whole = run(tmp_path / "whole", **options, **four)
    run(tmp_path / "other", **options, **four, model=dict(type=Net, norm=True))
    folder = tmp_path / "run"
    run(folder, **options, train_cfg=dict(by_epoch=True, max_epochs=5), randomness=dict(seed=4))
    run(folder, **options, train_cfg=dict(by_epoch=True, max_epochs=3))
    shutil.copy(tmp_path / "other" / "epoch_4.pth", folder / "pretrained.pth")
    for time, name in enumerate(f"{stem}.pth" for stem in ("epoch_3", "epoch_2", "epoch_1", "pretrained")):
        os.utime(folder / name, (1.7e9 + time, 1.7e9 + time))
    if problem == "origin deleted":  # then only the file times distinguish the runs
        (folder / ".last_run").unlink()
        (folder / "pretrained.pth").unlink()
        for number in (4, 5):
            os.utime(folder / f"epoch_{number}.pth", (1.6e9 + number, 1.6e9 + number))
    if problem == "damaged":
        damage(folder / "epoch_3.pth")
    else:
        (folder / "epoch_3.pth").unlink()
    capsys.readouterr()
    resumed = run(folder, **options, **four, resume=True)
    text = capsys.readouterr().out
    assert f"Resuming from {folder}/epoch_2.pth; all steps after iteration 10 will be repeated" in text
    names = "epoch_5.pth, epoch_4.pth" + ", pretrained.pth" * (problem != "origin deleted")
    assert f"ignoring {names} in {folder}: not written by this run" in text
    assert_same(weights(whole), weights(resumed))


def test_resume_raises_an_error_if_all_checkpoints_are_damaged(tmp_path):
    run(tmp_path)
    for path in tmp_path.glob("*.pth"):
        damage(path)
    with pytest.raises(CheckpointError, match=r"epoch_2\.pth is damaged"):
        run(tmp_path, resume=True)


def test_a_restarted_run_resumes_instead_of_returning_to_load_from(tmp_path, capsys):
    run(tmp_path / "first")
    source = tmp_path / "first" / "epoch_2.pth"
    torch.save(torch.load(source, weights_only=True)["state_dict"], tmp_path / "weights.pth")
    whole = run(tmp_path / "whole", load_from=tmp_path / "weights.pth")
    folder, options = tmp_path / "parts", dict(load_from=tmp_path / "weights.pth", resume=True)
    part = run(folder, **options, train_cfg=dict(by_epoch=True, max_epochs=1))
    assert part.iter == 5
    resumed = run(folder, **options, log_level="WARNING")
    assert "is not read" in capsys.readouterr().out
    assert_same(weights(resumed), weights(whole))
    assert run(tmp_path / "new", load_from=source, resume=True).checkpoints.resumed_from == source
