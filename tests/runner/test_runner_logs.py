"""Who writes, and what is said of keys that nobody reads."""

from slipstream.runner import logs
from slipstream.runner.user_config import unread_keys
from slipstream.visualization import BaseVisBackend, Visualizer


class Recorder(BaseVisBackend):
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step=0):
        self.seen.append(name)


def test_a_ready_visualizer_writes_on_rank_0_alone(tmp_path, monkeypatch):
    for main, expected in ((True, ["x"]), (False, [])):
        monkeypatch.setattr(logs, "is_main_process", lambda main=main: main)
        recorder = Recorder()
        opened = logs.open_logs(
            logs.RunName("t", "t", tmp_path), "ERROR", True, None, Visualizer(vis_backends=[recorder])
        )
        opened.visualizer.add_scalar("x", 1.0)
        assert recorder.seen == expected


def test_a_key_that_is_nearly_an_argument_is_pointed_out_and_a_variable_is_not():
    lines = list(unread_keys(["parm_scheduler", "data_root", "compile"], ["param_scheduler", "compile"]))
    assert lines == [
        "Nothing reads the configuration's key 'parm_scheduler'; did you mean 'param_scheduler'?"
    ]
