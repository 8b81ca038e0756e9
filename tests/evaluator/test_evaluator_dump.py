from __future__ import annotations

import numpy as np
import torch

from slipstream.evaluator import Accuracy, DumpResults, Evaluator


def _dump(path, *batches, size=1000):
    metric = DumpResults(str(path))
    for batch in batches:
        metric.process(None, batch)
    assert metric.evaluate(size) == {}
    return torch.load(path, weights_only=True)


def test_batches_are_split_into_samples_and_limited_to_the_dataset(tmp_path):
    first = {"preds": torch.arange(6).view(2, 3), "targets": torch.tensor([1, 2])}
    second = {"preds": torch.arange(6, 12).view(2, 3), "targets": torch.tensor([3, 4])}
    loaded = _dump(tmp_path / "new" / "out.pt", first, second, size=3)
    assert [entry["targets"].item() for entry in loaded] == [1, 2, 3]
    assert torch.equal(loaded[2]["preds"], torch.tensor([6, 7, 8]))


def test_offline_evaluation_matches_online_evaluation(tmp_path):
    scores, targets = torch.randn(6, 4), torch.randint(0, 4, (6,))
    evaluator = Evaluator([Accuracy(), DumpResults(tmp_path / "out.pt")])
    evaluator.process((scores, targets))
    live = evaluator.evaluate(6)
    kept = torch.load(tmp_path / "out.pt", weights_only=True)
    assert Evaluator(Accuracy()).offline_evaluate(kept, chunk_size=4) == live


def test_entries_share_no_memory_and_have_no_gradient(tmp_path):
    batch = torch.zeros(3, 5, requires_grad=True)
    metric = DumpResults(tmp_path / "out.pt")
    metric.process(None, {"preds": batch})
    entry = metric.results[0]["preds"]
    assert entry.untyped_storage().nbytes() == 5 * 4
    assert not entry.requires_grad


def test_lists_of_samples_arrays_and_plain_values_are_stored(tmp_path):
    sample = {
        "name": "a.png",
        "size": (4, 5),
        "boxes": np.ones((2, 4)),
        "score": np.float32(0.5),
        3: [None, True],
    }
    loaded = _dump(tmp_path / "out.pth", [sample], torch.tensor([1, 2]))
    assert torch.equal(loaded[0].pop("boxes"), torch.ones(2, 4, dtype=torch.float64))
    assert loaded == [{"name": "a.png", "size": (4, 5), "score": 0.5, 3: [None, True]}, 1, 2]
