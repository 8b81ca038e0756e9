"""Tests of the worker processes of a run's data loaders."""

import multiprocessing

from slipstream.runner import Runner
from tiny_runs import loader, training, validation


def test_worker_processes_end_with_the_run_and_restart_in_the_next_one(tmp_path):
    workers = dict(num_workers=1, persistent_workers=True)
    runner = Runner(
        **training(
            tmp_path,
            train_dataloader=loader(**workers),
            **{**validation(), "val_dataloader": loader(**workers)},
        )
    )
    before = set(multiprocessing.active_children())
    runner.train()
    assert set(multiprocessing.active_children()) == before
    runner.val()
    assert set(multiprocessing.active_children()) == before
