"""Activation checkpointing in two processes: SyncBN runs no collective twice, and results do not change."""

import copy

import pytest
import torch
from sharded_runs import ACCUMULATED, FSDP, Net, assert_same, train
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.model import convert_sync_batchnorm, sync_batchnorm
from slipstream.speed.activation_checkpointing import ActivationCheckpointingOptions, checkpoint_activations
from slipstream.step.dynamo import why_not_recomputed

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

BLOCKS = ActivationCheckpointingOptions(["Block"])


class SyncNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        kinds = [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)]
        self.blocks = nn.Sequential(*(nn.Sequential(*copy.deepcopy(kinds)) for _ in range(2)))
        convert_sync_batchnorm(self)

    def forward(self, x):
        return self.blocks(x).square().mean()


def sync_steps(model, backend=None):
    """Run six steps with gradients summed over the ranks.

    Return the losses and the final state, and the number of eager calls to `traceable_sum`.
    """
    params, sent = list(model.parameters()), []
    generator = torch.Generator().manual_seed(get_rank())

    def step(x):
        loss = model(x)
        return loss.detach(), torch.autograd.grad(loss, params)

    reduce = sync_batchnorm.traceable_sum
    if backend is None:  # with a backend, the caller counts the operations in the graph instead
        sync_batchnorm.traceable_sum = lambda x: sent.append(1) or reduce(x)
    losses = []
    try:
        run = torch.compile(step, fullgraph=True, backend=backend) if backend else step
        for _ in range(6):
            loss, grads = run(torch.randn(2, 3, 6, 6, generator=generator))
            losses.append(loss)
            with torch.no_grad():
                for p, grad in zip(params, grads, strict=True):
                    torch.distributed.all_reduce(grad)
                    p.sub_(grad, alpha=0.05)
    finally:
        sync_batchnorm.traceable_sum = reduce
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": torch.stack(losses), "state": state}, len(sent)


def sync_bn(folder):
    init_dist("pytorch")
    model = SyncNet()
    blocks = checkpoint_activations(model, ActivationCheckpointingOptions())
    nested = SyncNet()
    checkpoint_activations(nested, ActivationCheckpointingOptions(["blocks.*"]))
    checkpoint_activations(nested, ActivationCheckpointingOptions(["blocks"]))
    return blocks, [sync_steps(SyncNet()), sync_steps(model), sync_steps(nested)]


def sync_bn_in_one_graph(folder):
    counts = []

    def count(graph, inputs):
        names = [node.name for node in graph.graph.nodes]
        counts.append([sum(word in name for name in names) for word in ("all_reduce", "recomputed")])
        return make_boxed_func(graph.forward)

    model = SyncNet()
    checkpoint_activations(model, ActivationCheckpointingOptions())
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        result = sync_steps(model, aot_autograd(fw_compiler=count))[0]
    return counts, sync_steps(SyncNet())[0], result


def both(folder, parallel, **kwargs):
    """Train with and without activation checkpointing."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Net(norm=True)
        if recompute:
            assert len(checkpoint_activations(model, BLOCKS)) == 2
        results.append(train(folder / str(recompute), parallel, world=2, model=model, epochs=2, **kwargs))
    return results


def ddp(folder):
    return both(folder, "ddp", ema=True)


def ddp_accumulated(folder):
    return both(folder, "ddp", optim=ACCUMULATED)


def fsdp(folder):
    return both(folder, FSDP, ema=True)


TRAININGS = [ddp, ddp_accumulated, fsdp]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [sync_bn, sync_bn_in_one_graph, *TRAININGS]
    return run_in_two(functions, tmp_path_factory.mktemp("checkpointing"))


def test_sync_bn_counts_each_batch_once_and_sends_each_message_once(answers):
    for answer in answers["sync_bn"]:
        assert not isinstance(answer, str), answer
        blocks, ((kept, sent), *recomputed) = answer
        assert len(blocks) == 2
        assert sent == 6 * 2
        for result, again in recomputed:
            assert again == sent
            torch.testing.assert_close(result, kept, rtol=0, atol=0)


@pytest.mark.skipif(why_not_recomputed() is not None, reason="requires torch 2.12 or newer")
def test_sync_bn_in_a_step_graph_sends_each_message_once(answers):
    for answer in answers["sync_bn_in_one_graph"]:
        assert not isinstance(answer, str), answer
        ((messages, recomputed),), kept, result = answer
        assert messages == 2 * 2  # one forward and one backward message for each BatchNorm
        assert recomputed
        torch.testing.assert_close(result, kept, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", [function.__name__ for function in TRAININGS])
def test_activation_checkpointing_does_not_change_weights(answers, way):
    for answer in answers[way]:
        assert not isinstance(answer, str), answer
        kept, recomputed = answer
        assert_same(recomputed, kept)
