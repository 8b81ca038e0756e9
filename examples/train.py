"""Train a ResNet-18 on Fashion-MNIST to more than 90% test accuracy in two epochs on a CPU.

    python examples/train.py [--data FOLDER [--download]] [--launcher none|pytorch|slurm|mpi]

The data is read from the Debian package dataset-fashion-mnist or from a folder with the four IDX files. With
--download, missing files are downloaded to FOLDER, and their checksums are verified.
"""

import argparse

from slipstream.dataset import FashionMNIST
from slipstream.model import Classifier, ImgDataPreprocessor
from slipstream.runner import Runner
from slipstream.zoo import resnet18


class ResNet18(Classifier):
    def __init__(self):
        super().__init__(
            network=resnet18(num_classes=10, in_channels=1, small_input=False),
            data_preprocessor=ImgDataPreprocessor(mean=[72.9], std=[90.0]),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with the IDX files")
    parser.add_argument("--download", action="store_true", help="download missing files to --data")
    parser.add_argument("--launcher", default="none", choices=["none", "pytorch", "slurm", "mpi"])
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, help="maximum number of batches per epoch")
    parser.add_argument("--work-dir", default="./work_dirs/fashion_mnist")
    args = parser.parse_args()
    if args.download and args.data is None:
        parser.error("--download requires --data FOLDER")

    train_set = FashionMNIST(args.data, "train", download=args.download)
    test_set = FashionMNIST(args.data, "test", download=args.download)

    runner = Runner(
        model=ResNet18(),
        work_dir=args.work_dir,
        train_dataloader=dict(
            batch_size=64,
            num_batch_per_epoch=args.batches,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=train_set,
        ),
        optim_wrapper=dict(
            type="OptimWrapper",
            # type="AmpOptimWrapper", dtype="bfloat16",  # mixed precision, on hardware with native bfloat16 support
            optimizer=dict(type="AdamW", lr=0.001, weight_decay=0.01),
        ),
        param_scheduler=dict(type="OneCycleLR", eta_max=0.002, by_epoch=True, convert_to_iter_based=True),
        train_cfg=dict(by_epoch=True, max_epochs=args.epochs),
        val_dataloader=dict(
            batch_size=500, sampler=dict(type="DefaultSampler", shuffle=False), dataset=test_set
        ),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=100)),
        randomness=dict(seed=0),
        launcher=args.launcher,
        # cfg=dict(compile=True),  # compile the training step
    )
    runner.train()


if __name__ == "__main__":
    main()
