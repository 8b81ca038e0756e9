"""Tests of the simulator: comparisons with manually computed timelines and with the total number of bytes sent."""

import pytest

from slipstream.apps.scaling import Block, Cluster, Link, Model, Strategy, simulate
from slipstream.apps.scaling.simulate import FIRST_BUCKET_BYTES, SYNC_BN_MAX_ELEMENTS, Work, units

MIB = 2**20
# Between two GPUs, an all-reduce of n bytes takes n * beta seconds, and an all-gather or a reduce-scatter takes half
# that time. With this link, an all-reduce of 1 MiB takes 1 s.
UNIT = Link(0.0, 1 / MIB)


def cluster(gpus=2, local=2, intra=UNIT, inter=UNIT, **more):
    return Cluster(gpus, local, intra, inter, flops=1, memory_bandwidth=1, memory=1, **more)


def model(*mebibytes, norm=0):
    """Return a model whose blocks have the given sizes in MiB of float32 parameters."""
    return Model("m", tuple(Block(str(i), round(m * MIB / 4), 0, 0, norm) for i, m in enumerate(mebibytes)))


def plain(kind, **more):
    return Strategy(kind, **{"parameter_bytes": 4, "unit_parameters": 0, **more})


def spans(schedule, name):
    return [(e.start, e.end) for e in schedule.events if e.name == name]


def test_ddp_reduces_buckets_during_the_backward_pass():
    # Forward runs at 0-3 s, and backward at 3-5 s (block 2), 5-7 s (block 1) and 7-9 s (block 0). Each bucket is one
    # block of 3 MiB, which is reduced in 3 s.
    schedule = simulate(
        model(3, 3, 3), cluster(), plain("ddp", bucket_bytes=2 * MIB), Work([1] * 3, [2] * 3, 10)
    )
    assert spans(schedule, "all-reduce") == [(5, 8), (8, 11), (11, 14)]
    assert schedule.now == 24  # the optimizer waits for the last bucket


def test_fast_communication_exposes_only_its_last_bucket():
    schedule = simulate(model(1, 1), cluster(), plain("ddp", bucket_bytes=MIB), Work([1, 1], [5, 5], 0))
    assert spans(schedule, "all-reduce") == [(7, 8), (12, 13)]
    assert schedule.now == 13


def test_first_ddp_bucket_has_1_mib_and_others_have_the_limit():
    many = model(*[0.5] * 20)
    schedule = simulate(many, cluster(), plain("ddp", bucket_bytes=4 * MIB), Work([0] * 20, [0] * 20, 0))
    assert [event.sent for event in schedule.events] == [FIRST_BUCKET_BYTES, 4 * MIB, 4 * MIB, MIB]


def test_collectives_block_computation_without_overlap():
    schedule = simulate(
        model(3, 3), cluster(overlap=0.0), plain("ddp", bucket_bytes=MIB), Work([1, 1], [2, 2], 0)
    )
    assert schedule.now == 2 + 4 + 6


def test_fsdp2_gathers_one_unit_ahead_and_reduce_scatters_gradients():
    # Units of 2 MiB: an all-gather or a reduce-scatter takes 1 s. Forward takes 2 s per unit, backward 3 s.
    schedule = simulate(model(2, 2, 2), cluster(), plain("fsdp2"), Work([2] * 3, [3] * 3, 0))
    # Forward: the first gather runs at 0-1 s. Unit 0 runs at 1-3 s (next gather: 1-2 s), unit 1 at 3-5 s (next gather:
    # 3-4 s) and unit 2 at 5-7 s.
    # Backward: the first gather runs at 7-8 s. Unit 2 runs at 8-11 s (next gather: 8-9 s), unit 1 at 11-14 s and unit 0
    # at 14-17 s.
    # Each reduce-scatter is queued when its unit finishes, before the gather for the unit after the next one.
    assert spans(schedule, "all-gather") == [(0, 1), (1, 2), (3, 4), (7, 8), (8, 9), (12, 13)]
    assert spans(schedule, "reduce-scatter") == [(11, 12), (14, 15), (17, 18)]
    assert schedule.now == 18


def test_hsdp_all_reduces_its_partitions_between_nodes():
    fast, slow = Link(0, 0.5 / MIB), UNIT
    schedule = simulate(model(2), cluster(4, 2, fast, slow), plain("hsdp"), Work([1], [1], 0))
    # Gather within a node: 2 MiB * 1/2 * 0.5 = 0.5 s. All-reduce of the node's 2 MiB between two nodes: 2 s.
    assert spans(schedule, "all-gather") == [(0, 0.5), (1.5, 2)]
    assert spans(schedule, "reduce-scatter") == [(3, 3.5)]
    assert spans(schedule, "all-reduce") == [(3.5, 5.5)]


@pytest.mark.parametrize("channels", [8, SYNC_BN_MAX_ELEMENTS])
def test_sync_bn_waits_for_its_messages_and_for_earlier_buckets(channels):
    few = channels == 8  # With 8 channels, the moments need one all-reduce of 2 s; otherwise, two of 1 s.
    lone = Link(1.0 if few else 0.5, 0.0)  # An all-reduce of any size between two GPUs takes twice this time.
    net = model(1, 1, norm=channels)
    schedule = simulate(net, cluster(intra=lone), plain("ddp", bucket_bytes=MIB), Work([1, 1], [1, 1], 0))
    # Forward: 2 * (2 + 1) = 6. Backward of block 1: 2 + 1, so its bucket starts at 9. The all-reduces of block 0 wait
    # for this bucket, and the bucket of block 0 starts after the backward pass of block 0.
    bucket = 2 if few else 1
    assert len(spans(schedule, "SyncBN")) == (4 if few else 8)
    assert spans(schedule, "all-reduce") == [(9, 9 + bucket), (12 + bucket, 12 + 2 * bucket)]
    assert schedule.now == 12 + 2 * bucket
    without = simulate(
        net, cluster(intra=lone), plain("ddp", bucket_bytes=MIB, sync_bn=False), Work([1] * 2, [1] * 2, 0)
    )
    assert not spans(without, "SyncBN")


@pytest.mark.parametrize(("gpus", "local"), [(8, 8), (64, 8), (1, 8), (16, 1)])
def test_bytes_match_the_zero_paper(gpus, local):
    # Rajbhandari et al. 2020, section 7: DDP moves 2 Psi and full sharding 3 Psi, minus each GPU's own partition.
    net, work = model(3, 30, 7), Work([1] * 3, [1] * 3, 1)
    n = 40 * MIB * (gpus - 1) / gpus
    c = cluster(gpus, local)
    sent = {
        kind: sum(e.sent for e in simulate(net, c, plain(kind), work).events) for kind in ("ddp", "fsdp2")
    }
    assert sent == {"ddp": pytest.approx(2 * n), "fsdp2": pytest.approx(3 * n)}


def test_hsdp_gathers_within_nodes_and_all_reduces_partitions_between_nodes():
    net, work = model(8, 8), Work([1] * 2, [1] * 2, 1)
    schedule = simulate(net, cluster(16, 4), plain("hsdp"), work)
    assert sum(e.sent for e in schedule.events if e.name == "all-reduce") == 2 * 3 / 4 * 16 * MIB / 4
    assert sum(e.sent for e in schedule.events if e.name != "all-reduce") == 3 * 3 / 4 * 16 * MIB


def test_units_are_consecutive_complete_and_have_the_minimum_size():
    blocks = model(1, 2, 3, 1, 1).blocks
    assert units(blocks, MIB // 4 * 3) == [range(2), range(2, 3), range(3, 5)]
    assert units(blocks, 0) == [range(i, i + 1) for i in range(5)]
    assert units(blocks, 10**9) == [range(5)]


def test_one_gpu_only_computes():
    for kind in ("ddp", "fsdp2"):
        alone = simulate(model(5, 5, norm=3), cluster(1, 1), plain(kind), Work([1, 2], [3, 4], 5))
        assert alone.now == 15
