"""Tests of predictions: general properties, and comparisons with independent calculations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.apps.scaling import (
    GPUS,
    NETWORKS,
    Block,
    Cluster,
    Link,
    Model,
    Strategy,
    best,
    make_cluster,
    predict,
    segformer_1b,
)
from slipstream.apps.scaling.predict import estimate_work, expected_maximum, memory_per_gpu
from slipstream.errors import ConfigError

KINDS = ("ddp", "hsdp", "fsdp2")
blocks = st.builds(
    Block,
    st.just("b"),
    st.integers(1, 10**8),
    st.floats(0, 1e12),
    st.floats(0, 1e8),
    st.sampled_from([0, 0, 64]),
)
models = st.lists(blocks, min_size=1, max_size=8).map(lambda b: Model("m", tuple(b)))
kinds = st.sampled_from(KINDS)
links = st.builds(Link, st.floats(1e-7, 1e-4), st.floats(1e-12, 1e-9))


@st.composite
def clusters(draw):
    local, machines = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    return Cluster(
        local * machines,
        local,
        draw(links),
        draw(links),
        flops=1e14,
        memory_bandwidth=1e12,
        memory=8e10,
        launch=draw(st.floats(0, 1e-4)),
        overlap=draw(st.floats(0, 1)),
    )


@settings(deadline=None)
@given(models, clusters(), kinds, st.floats(1, 100))
def test_higher_bandwidth_is_never_slower(model, cluster, kind, factor):
    before = predict(model, cluster, Strategy(kind), 4).step_time
    for level in ("intra", "inter"):
        link = getattr(cluster, level)
        better = replace(cluster, **{level: Link(link.alpha, link.beta / factor)})
        assert predict(model, better, Strategy(kind), 4).step_time <= before * (1 + 1e-9)


@settings(deadline=None)
@given(models, clusters(), kinds, st.integers(1, 64))
def test_efficiency_is_at_most_1_and_times_are_not_negative(model, cluster, kind, batch):
    said = predict(model, cluster, Strategy(kind), batch)
    assert 0 < said.efficiency <= 1
    assert min(said.exposed, said.waiting, said.sent) >= 0
    assert said.samples_per_second == pytest.approx(batch * cluster.gpus / said.step_time)


@given(models, st.integers(0, 9))
def test_memory_decreases_with_gpus_if_sharded_and_is_constant_for_ddp(model, doublings):
    cluster = make_cluster(GPUS["h100"], NETWORKS["ib400"], 8 * 2**doublings, 8)
    more = replace(cluster, gpus=2 * cluster.gpus)
    sizes = {k: [memory_per_gpu(model, c, Strategy(k), 4) for c in (cluster, more)] for k in KINDS}
    assert sizes["fsdp2"][1] < sizes["fsdp2"][0]
    assert sizes["hsdp"][1] == sizes["hsdp"][0]
    assert sizes["ddp"][1] == sizes["ddp"][0]


def test_memory_matches_the_zero_paper():
    # Mixed-precision Adam requires 18 bytes per parameter: float32 weights, gradients and two states, and a bf16 copy.
    model = Model("m", (Block("a", 10**9, 0, 1000), Block("b", 10**9, 0, 500)))
    cluster = make_cluster(GPUS["h100"], NETWORKS["ib400"], 64, 8)
    assert memory_per_gpu(model, cluster, Strategy("ddp"), 10) == 2e9 * 18 + 10 * 1500 * 2
    sharded = memory_per_gpu(model, cluster, Strategy("fsdp2"), 10)
    assert sharded == 2e9 * 16 / 64 + 2e9 * (2 + 4) + 10 * 1500 * 2


def test_block_time_is_the_maximum_of_flop_time_and_memory_time():
    cluster = replace(make_cluster(GPUS["h100"], NETWORKS["ib400"], 1, 8), flops=1e12, memory_bandwidth=1e10)
    model = Model("m", (Block("computes", 0, 1e9, 1), Block("moves", 0, 1, 1e6)))
    work = estimate_work(model, cluster, Strategy("ddp"), 8)
    assert work.forward == pytest.approx([8e9 / 1e12, 2 * 8e6 * 2 / 1e10])
    assert work.backward == pytest.approx([2 * seconds for seconds in work.forward])


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_for_one_gpu_equals_the_measured_step_time(kind):
    cluster = make_cluster(GPUS["a100"], NETWORKS["eth25"], 1, 1)
    said = predict(segformer_1b(256, 256), cluster, Strategy(kind), 2, step_time=0.125)
    assert said.step_time == pytest.approx(0.125)


def test_measured_step_time_must_be_positive():
    cluster = make_cluster(GPUS["a100"], NETWORKS["eth25"], 8, 8)
    with pytest.raises(ConfigError, match="positive number of seconds, not 0"):
        predict(segformer_1b(64, 64), cluster, Strategy("ddp"), 2, step_time=0)


@pytest.mark.parametrize("n", [1, 2, 8, 64, 512])
def test_expected_maximum_of_n_agrees_with_random_samples(n):
    drawn = np.random.default_rng(0).standard_normal((20_000, n)).max(axis=1).mean()
    assert expected_maximum(n) == pytest.approx(drawn, abs=0.03)


def test_best_prediction_is_the_fastest_that_fits():
    model = segformer_1b(512, 512)
    cluster = make_cluster(GPUS["h100"], NETWORKS["ib400"], 64, 8)
    found = [predict(model, cluster, Strategy(kind), 2) for kind in KINDS]
    assert best(found).step_time == min(p.step_time for p in found)
    # DDP does not fit, because it requires 18 bytes for each of the 1.04e9 parameters.
    small = replace(cluster, memory=15e9)
    found = [predict(model, small, Strategy(kind), 1) for kind in KINDS]
    assert [p.fits for p in found] == [False, True, True]
    assert best(found).strategy.kind != "ddp"
    tiny = [predict(model, replace(cluster, memory=1), Strategy(kind), 1) for kind in KINDS]
    assert best(tiny).memory == min(p.memory for p in tiny)


def test_slow_networks_favor_hsdp_over_fsdp2_for_a_large_model():
    cluster = make_cluster(GPUS["h100"], NETWORKS["eth100"], 512, 8)
    times = {
        kind: predict(segformer_1b(1024, 1024), cluster, Strategy(kind), 2).step_time
        for kind in ("hsdp", "fsdp2")
    }
    assert times["hsdp"] < times["fsdp2"]


@pytest.mark.parametrize("gpus", [12, 20])
def test_number_of_gpus_must_be_a_multiple_of_the_gpus_per_node(gpus):
    with pytest.raises(
        ConfigError,
        match=rf"the number of GPUs \({gpus}\) is not a multiple of the number of GPUs per node \(8\)",
    ):
        make_cluster(GPUS["h100"], NETWORKS["ib400"], gpus, 8)


def test_number_of_gpus_must_be_positive():
    with pytest.raises(ConfigError, match="at least 1"):
        make_cluster(GPUS["h100"], NETWORKS["ib400"], 0, 8)


def test_gpus_within_one_node_do_not_use_the_network():
    four = make_cluster(GPUS["h100"], NETWORKS["eth25"], 4, 8)
    assert (four.local, four.machines) == (4, 1)


def test_segformer_1b_has_a_billion_parameters_mostly_in_the_third_stage():
    model = segformer_1b(1024, 1024)
    assert model.parameters == pytest.approx(1.035e9, rel=0.001)
    third = sum(b.parameters for b in model.blocks if b.name.startswith("block3."))
    assert third > 0.7 * model.parameters
    assert sum(b.name.startswith("block") for b in model.blocks) == 42
