"""Tests of control group limits, read from files in a temporary folder."""

import pytest

from slipstream.cgroups import available_memory, memory_limit, quotas


def write(root, lines, files):
    """Write `lines` to /proc/self/cgroup and `files` to /sys/fs/cgroup, both in the folder `root`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def test_quotas_of_the_cgroup_and_its_parents_apply(tmp_path):
    files = {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000", "memory/cpu.max": "1 1"}
    write(tmp_path, "4:memory:/other\n0::/job/step\n", files)
    assert quotas(tmp_path) == [1.5]


def test_machine_without_cgroups_has_no_limits(tmp_path):
    assert quotas(tmp_path) == []
    assert memory_limit(tmp_path) is None
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "4000", "a/memory.max": "5000"}, 4000),
        ("0::/\n", {"memory.max": "max"}, None),
    ],
)
def test_memory_limit_is_the_smallest_of_the_cgroup_and_its_parents(tmp_path, lines, files, expected):
    write(tmp_path, lines, files)
    assert memory_limit(tmp_path) == expected


def test_available_memory_follows_the_fullest_cgroup_and_ignores_cached_files(tmp_path):
    files = {}
    for path, limit, used in (("a/b", 5000, 1000), ("a", 6000, 4500)):
        files |= {f"{path}/memory.max": str(limit), f"{path}/memory.current": str(used)}
        files |= {f"{path}/memory.stat": "anon 7\ninactive_file 100\nactive_file 20"}
    write(tmp_path, "0::/a/b\n", files)
    assert available_memory(tmp_path) == 6000 - 4500 + 120


def test_cgroup_without_a_limit_does_not_bound_the_available_memory(tmp_path):
    files = {"memory.max": "max", "memory.current": "10", "memory.stat": "inactive_file 1"}
    write(tmp_path, "0::/\n", files)
    assert available_memory(tmp_path) is None
