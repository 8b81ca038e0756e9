"""Options implemented as step parts: two processes match one process with the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from two_processes import run_in_two

from part_runs import BATCH, Net, batches, sgd
from slipstream.dist import get_rank, get_world_size, init_dist
from slipstream.model import unwrap_model
from slipstream.runner import Runner
from slipstream.speed.accelerate import accelerate

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

GRAPH = dict(scope="step", backend="aot_eager", cache=False)
TOGETHER = dict(accumulate=2, clip_grad=dict(max_norm=0.3), ema=dict(type="swa", interval=2))
OPTIONS = {
    "around": dict(gradient_centralization=True, adaptive_clip=dict(clip_factor=0.02), layer_decay=0.75),
    "sam": dict(sam=dict(rho=0.3)),
    "adaptive": dict(sam=dict(rho=2.0, adaptive=True), sync_bn=True),
}
OPTIONS["all"] = {**OPTIONS["around"], **OPTIONS["sam"], "sync_bn": True, **TOGETHER}


def train(options, how):
    torch._dynamo.reset()
    model = Net(norm="sync_bn" in options)
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, dict(options, compile=how))
    mine = slice(get_rank(), None, get_world_size())
    for x, y in batches():
        step((x[mine], y[mine]))
    assert step.compiled_scope == ("step" if how else None)
    assert ("processes: 2, with averaged gradients" in step.summary()) == (get_world_size() == 2)
    return dict(model.state_dict()), step.average and dict(step.average.module.state_dict())


def eager(folder):
    return {name: train(options, None) for name, options in OPTIONS.items()}


def compiled(folder):
    return {name: train(OPTIONS[name], GRAPH) for name in ("around", "all")}


def sharded(folder, name="all"):
    """Train with a Runner and, in several processes, with FSDP2, which shards each block separately."""
    x, y = map(torch.cat, zip(*batches(), strict=True))
    options = {key: value for key, value in OPTIONS[name].items() if key not in ("sync_bn", "ema")}
    several = get_world_size() > 1
    runner = Runner(
        model=Net(norm=False),
        work_dir=str(folder / name),
        train_dataloader=dict(
            batch_size=BATCH // get_world_size(),
            dataset=TensorDataset(x, y),
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9, weight_decay=0.01)),
        default_hooks=dict(checkpoint=None),
        launcher="pytorch" if several else "none",
        randomness=dict(seed=0),
        log_level="ERROR",
        speed=dict(options, **(dict(parallel=dict(type="fsdp2", wrap=["Sequential"])) if several else {})),
    )
    runner.train()
    state = unwrap_model(runner.model).state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def sharded_around(folder):
    return sharded(folder, "around")


def sharded_sam(folder):
    return sharded(folder, "adaptive")


def start(folder):
    init_dist("pytorch", "gloo")


ALL = [start, eager, compiled, sharded_around, sharded_sam, sharded]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two(ALL, tmp_path_factory.mktemp("parts"), timeout=240)


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_match_one_process(answers, name):
    alone = train(OPTIONS[name], None)
    for answer in answers["eager"]:
        assert not isinstance(answer, str), answer
        assert_equal(answer[name], alone)


@pytest.mark.parametrize("name", ["around", "all"])
def test_compiled_step_in_two_processes_matches_one_process(answers, name):
    alone = train(OPTIONS[name], None)
    for answer in answers["compiled"]:
        assert not isinstance(answer, str), answer
        assert_equal(answer[name], alone)


@pytest.mark.parametrize(
    ("function", "name"), [(sharded_around, "around"), (sharded_sam, "adaptive"), (sharded, "all")]
)
def test_sharded_model_in_two_processes_matches_one_process(answers, function, name, tmp_path):
    alone = sharded(tmp_path, name)
    for answer in answers[function.__name__]:
        assert not isinstance(answer, str), answer
        assert_equal(answer, alone)
