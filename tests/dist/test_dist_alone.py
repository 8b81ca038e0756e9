"""Test that functions of `slipstream.dist` behave as in a single-process run if there is no process group."""

import torch

from slipstream import dist


def test_single_process_is_the_main_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")  # as set by a launcher, but there is no process group
    assert dist.get_dist_info() == (0, 1)
    assert dist.get_local_rank() == 0
    assert dist.is_main_process()
    assert not dist.is_distributed()
    assert dist.get_backend() is None
    assert dist.get_comm_device() == torch.device("cpu")
    assert dist.get_local_size() == 1
    assert dist.get_default_group() is None
    assert dist.init_local_group(0, 1) is None
    assert dist.get_local_group() is None
    assert dist.barrier() is None


def test_collectives_keep_values_unchanged():
    data, objects = torch.tensor([1.0, 2.0]), [1, "a"]
    dist.all_reduce(data, "mean")
    dist.broadcast(data)
    dist.broadcast_object_list(objects)
    assert data.tolist() == [1, 2]
    assert objects == [1, "a"]
    assert dist.all_gather_object("x") == ["x"]
    assert dist.gather_object("x") == ["x"]
    named = {"b": torch.ones(2), "a": data}
    dist.all_reduce_dict(named, "mean")
    dist.all_reduce_params([data])
    assert [tensor.tolist() for tensor in named.values()] == [[1, 1], [1, 2]]
    assert [tensor.tolist() for tensor in dist.all_gather(data) + dist.gather(data)] == [[1, 2], [1, 2]]


def test_results_are_truncated_to_the_size_of_the_dataset():
    assert dist.collect_results([1, 2, 3], 2) == [1, 2]
    assert dist.collect_results([1], 5) == [1]
    assert dist.collect_results_cpu([1, 2, 3], 2) == dist.collect_results_gpu([1, 2, 3], 2) == [1, 2]


def test_master_only_runs_only_on_rank_0_and_keeps_the_function_name(monkeypatch):
    @dist.master_only
    def answer(x):
        return x + 1

    assert answer(1) == 2
    assert answer.__name__ == "answer"
    monkeypatch.setattr("slipstream.dist.info.is_main_process", lambda: False)
    assert answer(1) is None
