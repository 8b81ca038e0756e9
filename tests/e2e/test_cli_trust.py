"""Test that data files execute code only with `--trust`, and that child processes and batch scripts also receive it."""

import pytest

from slipstream import train_from_recipe
from slipstream.cli.configure import command_args
from slipstream.cli.main import main
from slipstream.cli.parser import parse

MODULE = """
from pathlib import Path
from torch import nn
from slipstream.model import BaseModel
from slipstream.registry import MODELS

Path(__file__).with_name("was_here").touch()

@MODELS.register_module(name="TrustedNet", force=True)
class TrustedNet(BaseModel):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)
"""


@pytest.mark.parametrize("base", [False, True])
def test_explain_executes_code_from_a_data_file_only_with_trust(tmp_path, monkeypatch, capsys, base):
    module = f"trust_module_{base}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    key = f"_base_: {module}.py" if base else f"custom_imports: {{imports: [{module}]}}"
    (tmp_path / "a.yaml").write_text(f"{key}\nmodel: {{type: TrustedNet}}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "a.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "add --trust on the command line" in error
    assert not (tmp_path / "was_here").exists()
    assert main(["explain", "a.yaml", "--trust"]) == 0
    assert (tmp_path / "was_here").exists()


def test_the_option_is_passed_to_child_processes():
    args = parse(["train", "a.yaml", "--trust"])
    assert "--trust" in command_args(args)
    assert "--trust" not in command_args(parse(["train", "a.yaml"]))


def test_hydra_options_do_not_execute_code_from_a_recipe(tmp_path, monkeypatch, capsys):
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    call = "{_target_: os.system, command: 'touch was_here'}"
    (tmp_path / "hostile.yaml").write_text(
        f"defaults: [_self_]\narchitecture: regseg48\nhydra: {{callbacks: {{x: {call}}}}}\n"
    )
    words = [f"--config-dir={tmp_path}", "--config-name=hostile"]
    for option in (["--cfg", "job"], ["--multirun"], ["--info", "config"]):
        assert train_from_recipe.main([*words, *option]) == 2
        assert "contains 'os.system'" in capsys.readouterr().err
    assert not (tmp_path / "was_here").exists()
