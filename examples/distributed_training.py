"""Train a ResNet-18 in one or several processes with any launcher. No download is required.

    python examples/distributed_training.py
    torchrun --nproc-per-node=8 examples/distributed_training.py --launcher pytorch
    srun --ntasks-per-node=8 --gres=gpu:8 python examples/distributed_training.py --launcher slurm
    MASTER_ADDR=127.0.0.1 mpirun -np 8 python examples/distributed_training.py --launcher mpi

docs/distributed.md explains these and other launch commands. The images show stripes in ten directions.
"""

import argparse

import numpy as np
from torch.utils.data import Dataset

from slipstream.model import Classifier, ImgDataPreprocessor
from slipstream.runner import Runner
from slipstream.zoo import resnet18


class Stripes(Dataset):
    """A dataset of noisy stripe images, uint8 (3, 32, 32). The class is the direction of the stripes.

    Image i depends only on `seed` and i. Each process generates the images that it needs and stores none.
    """

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        label = index % 10
        angle = np.pi / 10 * (label + rng.uniform(-0.3, 0.3))
        rows, columns = np.mgrid[:32, :32] * rng.uniform(0.4, 1.0)
        waves = np.sin(rows * np.sin(angle) + columns * np.cos(angle) + rng.uniform(0, 2 * np.pi))
        image = 128 + waves * rng.uniform(20, 60, (3, 1, 1)) + rng.normal(0, 40, (3, 32, 32))
        return {"inputs": image.clip(0, 255).astype(np.uint8), "targets": label}


class ResNet18(Classifier):
    def __init__(self):
        super().__init__(
            network=resnet18(num_classes=10),
            data_preprocessor=ImgDataPreprocessor(mean=[128.0] * 3, std=[50.0] * 3),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", default="none", choices=["none", "pytorch", "slurm", "mpi"])
    # torch.distributed.launch passes this argument, but the Runner reads LOCAL_RANK from the environment.
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batches", type=int, help="maximum number of batches per epoch")
    parser.add_argument("--work-dir", default="./work_dirs/distributed")
    args = parser.parse_args()

    runner = Runner(
        model=ResNet18(),
        work_dir=args.work_dir,
        train_dataloader=dict(
            batch_size=32,  # per process
            num_batch_per_epoch=args.batches,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=Stripes(1280, seed=0),
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.02, momentum=0.9)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=True, convert_to_iter_based=True),
        train_cfg=dict(by_epoch=True, max_epochs=args.epochs),
        val_dataloader=dict(
            batch_size=64, sampler=dict(type="DefaultSampler", shuffle=False), dataset=Stripes(201, seed=1)
        ),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=10)),
        randomness=dict(seed=0),
        launcher=args.launcher,
    )
    runner.train()


if __name__ == "__main__":
    main()
