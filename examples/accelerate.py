"""Train a small network in a custom training loop with Slipstream's step.

    python examples/accelerate.py [--compile]
    torchrun --nproc-per-node 2 examples/accelerate.py [--compile]

The lines marked with # <- use `accelerate` and `feed`; the other lines form an ordinary training loop. In a few
seconds on a CPU, the network learns to count the bright squares in small synthetic images.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from slipstream import accelerate, feed  # <-
from slipstream.dist import init_dist, is_main_process


def pictures(count, seed):
    """Return a dataset of noisy images (1, 12, 12) of zero to three squares. The label is the number of squares."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(count)])
    numbers = torch.randint(0, 4, (count,), generator=generator)
    cells = torch.zeros(count, 9)
    for i in range(3):
        cells.scatter_(1, positions[:, i : i + 1], (numbers > i).float()[:, None])
    images = cells.view(count, 1, 3, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return TensorDataset(images + 0.3 * torch.randn(count, 1, 12, 12, generator=generator), numbers)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9, 4),
    )


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [(model(images).argmax(1) == numbers).float() for images, numbers in feed(loader)]  # <-
    model.train()
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the whole step as one graph")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        init_dist("pytorch")
    torch.manual_seed(0)
    data = pictures(2048, seed=1)
    sampler = DistributedSampler(data) if distributed else None
    loader = DataLoader(data, batch_size=64, shuffle=sampler is None, sampler=sampler, drop_last=True)
    val_loader = DataLoader(pictures(512, seed=2), batch_size=256)

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader))
    speed = dict(compile=args.compile, sync_bn=True, ema=dict(type="threshold", decay=0.99))  # <-
    step = accelerate(model, optimizer, F.cross_entropy, speed)  # <-

    for epoch in range(1, args.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in feed(loader):  # <-
            log = step(batch)  # <-
            scheduler.step()
        with step.averaged() as averaged:  # <-
            val_accuracy = accuracy(averaged, val_loader)
        if is_main_process():
            print(f"epoch {epoch}  loss {log['loss'].item():.4f}  accuracy {val_accuracy:.3f}")


if __name__ == "__main__":
    main()
