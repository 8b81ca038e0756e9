"""Tests of the costs of collectives: comparisons with explicit formulas, and general properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.scaling import Cluster, Gamma, Link
from slipstream.apps.scaling.collectives import (
    all_gather,
    all_reduce,
    hierarchical,
    reduce_scatter,
    ring,
    tree,
    volume,
)

FAST, SLOW = Link(1e-6, 1e-11), Link(5e-6, 4e-11)
LINKS = (FAST, SLOW)

links = st.builds(Link, st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
sizes = st.floats(1, 1e10)
counts = st.integers(1, 9).map(lambda n: 2**n)


def cluster(machines=1, local=8, intra=FAST, inter=SLOW, **more):
    return Cluster(
        machines * local, local, intra, inter, flops=1e14, memory_bandwidth=1e12, memory=8e10, **more
    )


def test_ring_in_one_node_takes_p_minus_1_latencies():
    assert ring(8e6, LINKS, 1, 8) == pytest.approx(7 * 1e-6 + 7 / 8 * 8e6 * 1e-11)


def test_ring_over_nodes_is_as_fast_as_its_slowest_link():
    expected = 12 * 1e-6 + 3 * 5e-6 + 15 / 16 * 1e6 * 4e-11
    assert ring(1e6, LINKS, 4, 4) == pytest.approx(expected)


def test_hierarchical_gather_adds_the_cost_of_both_levels():
    inside = 3 * 1e-6 + 3 / 4 * 1e6 * 1e-11
    between = 3 * 5e-6 + 3 / 4 * 1e6 * 4e-11
    assert hierarchical(1e6, LINKS, 4, 4) == pytest.approx(inside + between)


def test_tree_has_a_logarithmic_number_of_hops_between_nodes():
    assert tree(0, LINKS, 512, 8) == pytest.approx(2 * (7 * 1e-6 + 9 * 5e-6))
    assert tree(1e6, LINKS, 2, 1) == pytest.approx(2 * (5e-6 + 1e6 * 4e-11))


def test_collectives_on_one_gpu_take_no_time():
    alone = cluster(1, 1, launch=1e-3, gamma=Gamma(1, 1, 1))
    assert (
        all_reduce(1e9, alone, 1, 1) == all_gather(1e9, alone, 1, 1) == reduce_scatter(1e9, alone, 1, 1) == 0
    )


def test_small_messages_use_the_quick_protocol():
    links = (Link(4e-6, 1e-11, quick_alpha=1e-6), Link(1, 1))
    c = cluster(1, 2, *links)
    assert all_gather(100, c, 1, 2) == pytest.approx(1e-6 + 50 * 2e-11)
    assert all_gather(1e9, c, 1, 2) == pytest.approx(4e-6 + 0.5e9 * 1e-11)


def test_launch_and_local_work_are_added_to_each_collective():
    c = cluster(1, 2, launch=1e-3, gamma=Gamma(1e-10, 2e-10, 3e-10))
    wire = ring(1e6, LINKS, 1, 2)
    assert all_gather(1e6, c, 1, 2) == pytest.approx(1e-3 + wire + 2e-4)
    assert reduce_scatter(1e6, c, 1, 2) == pytest.approx(1e-3 + wire + 3e-4)
    assert all_reduce(1e6, c, 1, 2) == pytest.approx(1e-3 + 2 * wire + 1e-4)


@given(sizes, links, links, counts, counts)
def test_all_reduce_is_not_slower_than_reduce_scatter_plus_all_gather(n, intra, inter, machines, local):
    c = cluster(machines, local, intra, inter)
    both = reduce_scatter(n, c, machines, local) + all_gather(n, c, machines, local)
    whole = all_reduce(n, c, machines, local)
    assert whole <= both * (1 + 1e-9)
    if whole < both * (1 - 1e-9):
        assert whole == pytest.approx(tree(n, (intra, inter), machines, local))


@given(sizes, links, links, counts, counts, st.floats(1, 1000))
def test_higher_bandwidth_or_lower_latency_is_never_slower(n, intra, inter, machines, local, factor):
    base = cluster(machines, local, intra, inter)
    for better in (
        cluster(machines, local, Link(intra.alpha, intra.beta / factor), inter),
        cluster(machines, local, intra, Link(inter.alpha, inter.beta / factor)),
        cluster(machines, local, intra, Link(inter.alpha / factor, inter.beta))
        if inter.beta <= intra.beta and inter.alpha <= intra.alpha
        else base,
    ):
        for collective in (all_reduce, all_gather, reduce_scatter):
            assert collective(n, better, machines, local) <= collective(n, base, machines, local) * (1 + 1e-9)


@given(sizes, links, counts)
def test_all_reduce_respects_the_bandwidth_and_latency_lower_bounds(n, link, p):
    # Each of p GPUs must send 2 * (p - 1) / p * n bytes, and sending data to p GPUs requires at least log2(p) steps.
    c = cluster(p, 1, link, link)
    took = all_reduce(n, c, p, 1)
    assert took >= 2 * volume(n, p) * link.beta * (1 - 1e-9)
    assert took >= math.log2(p) * link.alpha
