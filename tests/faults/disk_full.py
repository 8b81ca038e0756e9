"""Train on a disk that is too small for the checkpoints, free space, and resume.

Run in a mount namespace: `unshare -rm python tests/faults/disk_full.py FOLDER`. The script mounts tmpfs file
systems below FOLDER. The last line of the output is JSON, which `test_faults_disk_full.py` checks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.errors import CheckpointError
from tiny_runs import Net, assert_same, run, weights

MIB = 2**20


class Large(Net):
    """A model with a checkpoint of about 1 MiB."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.more = torch.nn.Parameter(torch.zeros(MIB // 4))

    def forward(self, inputs: Any, targets: Any, mode: str) -> Any:
        out = super().forward(inputs, targets, mode)
        if mode == "loss":
            out["loss"] = out["loss"] + (self.more - out["loss"].detach()).square().mean()
        return out


def train(folder: Path, asynchronous: bool) -> Any:
    torch.manual_seed(0)
    hook = dict(type="CheckpointHook", interval=1, max_keep_ckpts=2, async_save=asynchronous)
    return run(
        folder,
        model=Large(),
        train_cfg=dict(by_epoch=True, max_epochs=4),
        default_hooks=dict(checkpoint=hook, logger=dict(type="LoggerHook", interval=1)),
        resume=True,
    )


def full_disk(folder: Path, asynchronous: bool, whole: Any) -> dict[str, Any]:
    """Fill the disk during the run, free space, and resume the run. Return the observations."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    work_dir, filler = folder / "run", folder / "filler"
    filler.write_bytes(bytes(11 * MIB // 2))  # leaves space for two checkpoints
    found: dict[str, Any] = {"folder": str(work_dir), "error": None}
    try:
        train(work_dir, asynchronous)
    except CheckpointError as error:
        found["error"] = str(error)
    found["kept"] = sorted(path.name for path in work_dir.glob("*.pth"))
    found["temporary"] = [path.name for path in work_dir.glob(".*.tmp")]
    for name in found["kept"]:
        torch.load(work_dir / name, weights_only=True)
    filler.unlink()
    resumed = train(work_dir, asynchronous)
    found["resumed_from"] = resumed.checkpoints.resumed_from.name
    assert_same(weights(resumed), weights(whole))
    lines = Path(resumed.log_dir, "vis_data", "scalars.json").read_text().splitlines()
    found["logged"] = [json.loads(line)["step"] for line in lines]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    whole = train(folder / "whole", False)
    disks = {"synchronous": False, "asynchronous": True}
    print(json.dumps([full_disk(folder / name, value, whole) for name, value in disks.items()]))


if __name__ == "__main__":
    main()
