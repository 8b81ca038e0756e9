from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slipstream.runner import Runner
from tiny_runs import Accuracy, Net, samples


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*samples(), strict=True)


def test_stream_without_length_has_the_same_metrics(tmp_path):
    net = Net()
    answers = []
    for number, loader in enumerate(
        (DataLoader(Stream(), batch_size=7), dict(dataset=TensorDataset(*samples()), batch_size=7))
    ):
        runner = Runner(
            net,
            tmp_path / str(number),
            val_dataloader=loader,
            val_cfg=dict(),
            val_evaluator=Accuracy(),
            log_level="ERROR",
        )
        answers.append((runner.val(), runner.val_loop.batches))
    assert answers[0] == answers[1]
    assert answers[0][1] == 6
