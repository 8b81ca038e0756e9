import pytest

from slipstream import cores


def test_quotas_of_the_cgroup_and_its_parents_apply(monkeypatch, tmp_path):
    inner = tmp_path / "sys/fs/cgroup/job/step"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/other\n0::/job/step\n")
    monkeypatch.setattr(cores, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert cores.quotas() == [1.5]


def test_machine_without_cgroups_has_no_quotas(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert cores.quotas() == []


@pytest.mark.parametrize(("quotas", "expected"), [([], 3), ([1.5], 2), ([0.2, 9.0], 1), ([64.0], 3)])
def test_cores_are_between_one_and_the_cpu_affinity(monkeypatch, quotas, expected):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(cores, "quotas", lambda: quotas)
    assert cores.cores() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Chip: 9 GHz\nmodel name\t: Other\n", "Chip: 9 GHz"),
        ("", "arch"),
        (None, "arch"),
    ],
)
def test_cpu_has_a_name(monkeypatch, tmp_path, text, expected):
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/cpuinfo").write_text(text)
    monkeypatch.setattr(cores, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(cores.platform, "processor", lambda: "")
    monkeypatch.setattr(cores.platform, "machine", lambda: "arch")
    assert cores.cpu_name() == expected
