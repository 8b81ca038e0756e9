"""A run with secrets in its configuration uses the real values, but does not write them to any file."""

import pytest
import torch

from slipstream.config import Config
from slipstream.registry import DATASETS, MODELS, VISBACKENDS
from slipstream.runner import Runner
from slipstream.visualization import BaseVisBackend
from tiny_runs import Net, Noisy

KEY, PASSWORD, TOKEN = "0f3c-key-of-a-tracker-91", "open-sesame-77", "ghp_" + "Zx9" * 12

CONFIG = f"""
model: {{type: Net}}
train_dataloader: {{batch_size: 20, dataset: {{type: Noisy}}}}
work_dir: out
url: 'https://{{{{ $TRACKER_API_KEY }}}}@host'
train_cfg: {{by_epoch: true, max_epochs: 1}}
optim_wrapper: {{optimizer: {{type: SGD, lr: 0.1}}}}
token: {TOKEN}
visualizer:
  vis_backends:
  - {{type: LoginBackend, api_key: {{{{ $TRACKER_API_KEY }}}}, login: {{user: bob, password: {PASSWORD}}}}}
  - {{type: LocalVisBackend}}
  - {{type: TensorboardVisBackend}}
"""


class LoginBackend(BaseVisBackend):
    def __init__(self, save_dir, api_key, login):
        super().__init__(save_dir)
        assert (api_key, login["password"]) == (KEY, PASSWORD)


def test_no_file_of_a_run_contains_its_secrets(tmp_path, monkeypatch, capfd):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKER_API_KEY", KEY)
    for registry, kind in {
        VISBACKENDS: LoginBackend,
        MODELS: Net,
        DATASETS: Noisy,
    }.items():
        monkeypatch.setitem(registry.module_dict, kind.__name__, kind)
    cfg = Config.fromstring(CONFIG, "yaml")
    Runner.from_cfg(cfg).train()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {".pth", ".py", ".log"} <= {path.suffix for path in files}
    assert any("tfevents" in path.name for path in files)
    for secret in (KEY, PASSWORD, TOKEN):
        assert not [path.name for path in files if secret.encode() in path.read_bytes()]
        assert secret not in "".join(capfd.readouterr())
    checkpoint = torch.load(tmp_path / "out" / "epoch_1.pth", weights_only=True)
    assert "{{ $TRACKER_API_KEY }}" in checkpoint["meta"]["cfg"]
    dump = next(path for path in files if path.name == "config.py")
    assert Config.fromfile(dump).visualizer.vis_backends[0].api_key == KEY
