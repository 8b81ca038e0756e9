"""Training metrics of two ranks: every sample counts once, and both ranks have the same values."""

import os

import pytest
import torch
import torch.nn.functional as F
from two_processes import run_in_two

from slipstream.dist import init_dist
from slipstream.runner import Runner

EPOCHS, SAMPLES = 2, 12


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(7, generator=generator), torch.randint(0, 6, (), generator=generator)


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(7, 6)


def train(folder, speed=None):
    init_dist("pytorch")
    runner = Runner(
        model=dict(
            type="SupervisedModel", network=network(), train_metrics=[dict(type="Top1"), dict(type="Top5")]
        ),
        work_dir=str(folder),
        train_dataloader=dict(dataset=Images(), batch_size=2, collate_fn=dict(type="default_collate")),
        train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        custom_hooks=[dict(type="TrainMetricsHook")],
        launcher="pytorch",
        log_level="ERROR",
        speed=speed,
    )
    runner.train()
    return [runner.message_hub.get_info(f"train/{name}") for name in ("Accuracy", "Top5")]


def eagerly(folder):
    return train(folder)


def as_one_graph(folder):
    return train(folder, dict(compile=dict(backend="eager", scope="step")))


def right_samples(k):
    samples = [Images()[index] for index in range(SAMPLES)]
    logits, targets = network()(torch.stack([x for x, _ in samples])), torch.stack([y for _, y in samples])
    better = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert F.cross_entropy(logits, targets) > 0
    return (better < k).double().mean().item()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    assert "RANK" not in os.environ
    return run_in_two([eagerly, as_one_graph], tmp_path_factory.mktemp("metrics"))


@pytest.mark.parametrize("way", ["eagerly", "as_one_graph"])
def test_every_rank_has_the_metrics_of_all_samples(answers, way):
    wanted = [right_samples(1), right_samples(5)]
    assert 0 < wanted[0] < wanted[1] < 1
    for found in answers[way]:
        assert found == pytest.approx(wanted)
