"""Train a model from the transformers library in a custom training loop with Slipstream's step.

    pip install transformers
    python examples/transformers_bert/train.py [--compile]

The model computes its own loss (`model(**batch).loss`), so `accelerate` needs no loss function. A small BERT
with random weights learns to detect whether the first token of a sequence occurs again.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from slipstream import accelerate, feed


def sequences(count, seed):
    """Return samples in the format of a tokenized dataset: dicts of token ids, attention masks and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 30, (count, 12), generator=generator)
    repeated = torch.rand(count, generator=generator) < 0.5
    ids[repeated, 7] = ids[repeated, 0]
    labels = (ids[:, 1:] == ids[:, :1]).any(1).long()
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label}
        for i, label in zip(ids, labels, strict=True)
    ]


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [(model(**batch).logits.argmax(1) == batch["labels"]).float() for batch in feed(loader)]
    model.train()
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the whole step as one graph")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(sequences(2048, seed=1), batch_size=64, shuffle=True)
    step = accelerate(model, optimizer, speed=dict(compile=args.compile, clip_grad=dict(max_norm=1.0)))
    for epoch in range(1, args.epochs + 1):
        for batch in feed(loader):
            log = step(batch)
        val_accuracy = accuracy(model, DataLoader(sequences(512, seed=2), batch_size=256))
        print(f"epoch {epoch}  loss {log['loss'].item():.4f}  accuracy {val_accuracy:.3f}")
    print(step.summary())


if __name__ == "__main__":
    main()
