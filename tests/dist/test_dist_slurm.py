import pytest

from slipstream.dist import expand_nodelist
from slipstream.errors import DistributedError


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("host1", "host1"),
        ("host1,host2", "host1 host2"),
        ("n[01-03,7],gpu1", "n01 n02 n03 n7 gpu1"),
        ("n[7,01-03]", "n7 n01 n02 n03"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("cpu3,gpu[1-2]", "cpu3 gpu1 gpu2"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a-b-[07-08]-x,c[1]", "a-b-07-x a-b-08-x c1"),
        ("n[1-2].cluster.org", "n1.cluster.org n2.cluster.org"),
    ],
)
def test_node_list_is_expanded_as_by_slurm(nodelist, hosts):
    assert expand_nodelist(nodelist) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[", "n[1", "n]1[", "n[]", "n[a-b]", "n[[1]]"]
)
def test_invalid_node_list_raises_an_error(text):
    with pytest.raises(DistributedError) as info:
        expand_nodelist(text)
    assert f"{text!r} is not a valid Slurm node list" in str(info.value)
