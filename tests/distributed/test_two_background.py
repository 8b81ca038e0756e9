"""Two processes that compile in the background switch to the graph at the same batch."""

import torch
import torch.nn.functional as F
from two_processes import run_in_two

from part_runs import Net, batches, sgd
from slipstream.dist import get_rank, get_world_size, init_dist
from slipstream.speed.accelerate import accelerate

GRAPH = dict(scope="step", backend="aot_eager", cache=False)
ASKED = (2, 5)
"""Number of polls on each rank before its graph is ready."""


class After:
    """A mock background compiler that finishes after `asked` polls."""

    seconds, exceeded = 0.0, False

    def __init__(self, asked):
        self.left = asked

    def start(self, work):
        pass

    def done(self):
        self.left -= 1
        return self.left < 0

    def stop(self):
        pass


def train(asked):
    model = Net(norm=False)
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, dict(compile=GRAPH if asked else None))
    mine, by_graph = slice(get_rank(), None, get_world_size()), []
    if asked:
        step._step.background = After(asked)
    for x, y in [*batches(), *batches()]:
        step((x[mine], y[mine]))
        by_graph.append(bool(asked and step._step._step and step._step._step.verified))
    return dict(model.state_dict()), by_graph


def two(folder):
    init_dist("pytorch")
    return train(ASKED[get_rank()])


def test_both_ranks_switch_when_the_slower_rank_has_its_graph(tmp_path):
    answers = run_in_two([two], tmp_path)["two"]
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    (weights, first), (others, second) = answers
    assert first == second
    # One batch determines the trained parameters, one starts the compilation, five poll for the graph, and the next one
    # verifies it.
    assert first.index(True) == 7
    expected, _ = train(0)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(others, expected, rtol=1e-9, atol=1e-12)
