import pytest
import torch
from two_processes import run_in_two

from slipstream import dist
from slipstream.errors import DistributedError


def info(folder):
    dist.init_dist("pytorch", timeout=30)
    dist.init_dist("pytorch")  # a second call changes nothing
    return dist.get_dist_info(), dist.get_local_rank(), dist.get_backend(), dist.is_main_process()


def all_reduce(folder):
    answers = {}
    for op in ("sum", "mean", "max", "min", "product"):
        data = torch.tensor([1.0, 5.0]) if dist.get_rank() == 0 else torch.tensor([3.0, 2.0])
        dist.all_reduce(data, op)
        answers[op] = data.tolist()
    strided = torch.arange(6.0).view(3, 2).t()
    dist.all_reduce(strided)
    try:
        dist.all_reduce(torch.ones(1), "average")
    except DistributedError as error:
        answers["unknown"] = str(error)
    return answers, strided.tolist()


def broadcast(folder):
    data = torch.full((2,), float(dist.get_rank()))
    dist.broadcast(data, src=1)
    objects = [dist.get_rank(), {"a": dist.get_rank()}]
    dist.broadcast_object_list(objects)
    strided = torch.arange(6.0).view(3, 2).t() * (1 + dist.get_rank())
    dist.broadcast(strided)
    return data.tolist(), objects, strided.tolist()


def gather(folder):
    return dist.all_gather_object({"rank": dist.get_rank()})


def collect(folder):
    rank = dist.get_rank()
    even = dist.collect_results([[0, 2, 4], [1, 3, 0]][rank], 5)  # sample 0 was repeated
    uneven = dist.collect_results([["a", "c", "e"], ["b", "d"]][rank], 5)
    return even, uneven, dist.collect_results([], 0)


def seed(folder):
    return dist.sync_random_seed()


def master(folder):
    dist.barrier()
    return dist.master_only(lambda: "done")()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [info, all_reduce, broadcast, gather, collect, seed, master]
    return run_in_two(functions, tmp_path_factory.mktemp("collectives"))


def test_each_process_knows_its_rank(answers):
    assert answers["info"] == [((0, 2), 0, "gloo", True), ((1, 2), 1, "gloo", False)]


def test_all_reduce_reduces_in_place_on_every_rank(answers):
    first, second = answers["all_reduce"]
    assert first == second
    reductions, strided = first
    assert reductions.pop("unknown").startswith("all_reduce knows sum, mean")
    assert reductions == {"sum": [4, 7], "mean": [2, 3.5], "max": [3, 5], "min": [1, 2], "product": [3, 10]}
    assert strided == [[0, 4, 8], [2, 6, 10]]


def test_broadcast_overwrites_in_place_from_the_rank_that_is_named(answers):
    wanted = ([1, 1], [0, {"a": 0}], [[0, 2, 4], [1, 3, 5]])
    assert answers["broadcast"] == [wanted, wanted]


def test_gathered_objects_come_in_rank_order_on_every_rank(answers):
    assert answers["gather"] == [[{"rank": 0}, {"rank": 1}]] * 2


def test_collected_results_are_interleaved_and_cut_and_come_to_rank_0_alone(answers):
    assert answers["collect"] == [([0, 1, 2, 3, 4], ["a", "b", "c", "d", "e"], []), (None, None, None)]


def test_a_drawn_seed_is_the_same_on_every_rank(answers):
    first, second = answers["seed"]
    assert isinstance(first, int)
    assert first == second


def test_master_only_runs_on_rank_0_alone(answers):
    assert answers["master"] == ["done", None]
