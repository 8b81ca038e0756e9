"""Worker process of `openmmlab.py`: train an OpenMMLab configuration, a few steps at a time, on command.

    python openmmlab_worker.py ENGINE LOG CONFIG WORK_DIR OPTION...

Each line of standard input contains a number of steps. For each line, the worker prints one line of JSON with the step
times and the scope of the compiled code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    engine, log, config, work_dir, *options = sys.argv[1:]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if engine == "slipstream":
        import slipstream.openmmlab  # noqa: F401
    from mmengine.config import Config, DictAction
    from mmengine.runner import Runner

    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    cfg = Config.fromfile(config)
    cfg.merge_from_dict(parser.parse_args(["--cfg-options", *options]).cfg_options)
    cfg.work_dir = work_dir
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    cfg.test_dataloader = cfg.test_cfg = cfg.test_evaluator = None
    hook = make_command_hook(responses)
    runner = Runner.from_cfg(cfg)
    runner.register_hook(hook, priority="LOWEST")
    runner.train()


def make_command_hook(responses: TextIO) -> Any:
    """Return a hook that reads step counts from standard input, and writes the step times to `responses`."""
    from mmengine.hooks import Hook

    class CommandHook(Hook):
        remaining = 0
        step_start = 0.0
        times: list[float] | None = None

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if self.remaining:
                return
            if self.times is not None:
                print(
                    json.dumps({"times": self.times, "scope": get_compiled_scope(runner)}),
                    file=responses,
                    flush=True,
                )
            command = sys.stdin.readline()
            if not command.strip():
                os._exit(0)
            self.remaining, self.times, self.step_start = int(command), [], time.perf_counter()

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            now = time.perf_counter()
            assert self.times is not None
            self.times.append(now - self.step_start)
            self.step_start, self.remaining = now, self.remaining - 1

    return CommandHook()


def get_compiled_scope(runner: Any) -> str | None:
    """Return the compiled scope: 'step', 'model' or 'block'; None if nothing is compiled or the engine is MMEngine."""
    if not hasattr(runner, "step"):
        return None
    from slipstream.speed.steps import compiled_scope

    return compiled_scope(runner.step, runner.model)


if __name__ == "__main__":
    main()
