import pytest
import torch
from two_processes import run_in_two

from slipstream import dist
from slipstream.errors import DistributedError


def info(folder):
    dist.init_dist("pytorch", timeout=30)
    dist.init_dist("pytorch")  # the second call has no effect
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


DTYPES = [torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64]


def dtypes(folder):
    """Reduce strided views of tensors with every op and dtype."""
    answers = {}
    for dtype in DTYPES:
        for op in ("sum", "mean", "max", "min", "product"):
            whole = torch.tensor([3, 9, 7, 9]) if dist.get_rank() == 0 else torch.tensor([4, 9, 2, 9])
            whole = whole.to(dtype)
            dist.all_reduce(whole[::2], op)
            answers[str(dtype), op] = whole.tolist()
    return answers


def gathered(folder):
    rank = dist.get_rank()
    answers = []
    for data in (
        torch.tensor(rank),
        torch.tensor([rank == 0]),
        torch.arange(6, dtype=torch.int16).view(2, 3).t() + rank,
        torch.tensor([[1.5 + rank]], dtype=torch.bfloat16),
    ):
        everywhere, at_one = dist.all_gather(data), dist.gather(data, dst=1)
        assert all(part.dtype == data.dtype for part in everywhere + at_one)
        answers.append(([part.tolist() for part in everywhere], [part.tolist() for part in at_one]))
    answers.append([tuple(part.shape) for part in dist.all_gather(torch.empty(0, 2))])
    return answers, dist.gather_object(rank, dst=1)


def unequal(folder):
    rank = dist.get_rank()
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(2 + rank)),
        "dtype": lambda: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int32][rank])),
        "op": lambda: dist.all_reduce(torch.ones(2), ["sum", "max"][rank]),
        "all_gather": lambda: dist.all_gather(torch.ones(2 + rank)),
        "gather": lambda: dist.gather(torch.ones(2 + rank)),
        "broadcast": lambda: dist.broadcast(torch.ones(2 + rank)),
        "all_reduce_dict": lambda: dist.all_reduce_dict({"ab"[rank]: torch.ones(1)}),
        "all_reduce_params": lambda: dist.all_reduce_params([torch.ones(1)] * (1 + rank)),
        "another": lambda: dist.broadcast(torch.ones(1)) if rank else dist.all_reduce(torch.ones(1)),
    }
    answers = {}
    for name, call in calls.items():
        try:
            answers[name] = call()
        except DistributedError as error:
            answers[name] = str(error)
    return answers


def broadcast(folder):
    data = torch.full((2,), float(dist.get_rank()))
    dist.broadcast(data, src=1)
    objects = [dist.get_rank(), {"a": dist.get_rank()}]
    dist.broadcast_object_list(objects)
    strided = torch.arange(6.0).view(3, 2).t() * (1 + dist.get_rank())
    dist.broadcast(strided)
    return data.tolist(), objects, strided.tolist()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [info, all_reduce, dtypes, broadcast, gathered, unequal]
    return run_in_two(functions, tmp_path_factory.mktemp("collectives"))


def test_each_process_returns_its_rank(answers):
    assert answers["info"] == [((0, 2), 0, "gloo", True), ((1, 2), 1, "gloo", False)]


def test_all_reduce_reduces_in_place_on_every_rank(answers):
    first, second = answers["all_reduce"]
    assert first == second
    reductions, strided = first
    assert reductions.pop("unknown").startswith("all_reduce supports sum, mean")
    assert reductions == {"sum": [4, 7], "mean": [2, 3.5], "max": [3, 5], "min": [1, 2], "product": [3, 10]}
    assert strided == [[0, 4, 8], [2, 6, 10]]


def test_every_dtype_is_reduced_and_skipped_elements_are_unchanged(answers):
    wanted = {"sum": (7, 9), "mean": (3.5, 4.5), "max": (4, 7), "min": (3, 2), "product": (12, 14)}
    for dtype in DTYPES:
        for op, (left, right) in wanted.items():
            if not dtype.is_floating_point:
                left, right = int(left), int(right)
            assert answers["dtypes"][0][str(dtype), op] == [left, 9, right, 9], (dtype, op)
    assert answers["dtypes"][0] == answers["dtypes"][1]


def test_tensors_are_gathered_in_rank_order_with_their_dtype_and_shape(answers):
    base = [[0, 3], [1, 4], [2, 5]]
    parts = [[0, 1], [[True], [False]], [base, [[x + 1 for x in row] for row in base]], [[[1.5]], [[2.5]]]]
    empty = [(0, 2), (0, 2)]
    assert answers["gathered"][0] == ([(part, []) for part in parts] + [empty], None)
    assert answers["gathered"][1] == ([(part, part) for part in parts] + [empty], [0, 1])


def test_mismatched_calls_or_shapes_raise_errors_on_every_rank(answers):
    first, second = answers["unequal"]
    assert first.keys() == second.keys()
    for name, text in first.items():
        function = name if name.startswith(("all", "gather", "broad")) else "all_reduce"
        assert text.startswith(
            f"{function}: every rank must call the same function with the same options, shapes and dtypes, but rank"
        ), name
    assert "[2]" in first["gather"]


def test_broadcast_overwrites_in_place_with_the_value_of_src(answers):
    wanted = ([1, 1], [0, {"a": 0}], [[0, 2, 4], [1, 3, 5]])
    assert answers["broadcast"] == [wanted, wanted]
