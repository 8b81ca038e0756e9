"""Tests of log output on each rank, and of warnings about unused configuration keys."""

from slipstream.runner import logs
from slipstream.runner.user_config import unknown_key_warnings
from slipstream.visualization import BaseVisBackend, Visualizer


class Recorder(BaseVisBackend):
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step=0):
        self.seen.append(name)


def test_visualizer_object_writes_only_on_rank_0(tmp_path, monkeypatch):
    for main, expected in ((True, ["x"]), (False, [])):
        monkeypatch.setattr(logs, "is_main_process", lambda main=main: main)
        recorder = Recorder()
        visualizer = Visualizer(vis_backends=[recorder])
        opened = logs.open_logs(tmp_path, "t", True, "ERROR", None, visualizer)
        opened.visualizer.add_scalar("x", 1.0)
        assert recorder.seen == expected


def test_misspelled_keys_are_reported_but_variables_are_not():
    lines = list(
        unknown_key_warnings(["parm_scheduler", "data_root", "compile"], ["param_scheduler", "compile"])
    )
    assert lines == ["The configuration key 'parm_scheduler' is not used; did you mean 'param_scheduler'?"]
    assert list(unknown_key_warnings(["ema"], ["compile"])) == [
        "The Runner does not read the configuration key 'ema'; to set it, use speed=dict(ema=...)"
    ]
