"""Train on a Ray cluster with Ray Train: python ray_train.py RECIPE [key=value ...]

Ray starts one process per worker and creates the process group. A failed job resumes from the last checkpoint in the
work_dir, which must be in a folder shared by all nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train in one of Ray's worker processes."""
    from slipstream.cli.main import main

    command = ["train", config["recipe"], *config["overrides"], "--launcher=pytorch", "--resume"]
    if status := main([*command, f"--work-dir={config['work_dir']}"]):
        raise RuntimeError(f"slipstream train failed with status {status}; see the messages above")


def main() -> None:
    """Start the workers on the cluster and wait until training ends."""
    import ray.train
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--gpu", action="store_true", help="reserve one GPU per process")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/ray"))
    args = parser.parse_args()
    config = {"recipe": args.recipe, "overrides": args.overrides, "work_dir": str(args.work_dir.absolute())}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
