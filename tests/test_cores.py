import pytest

from slipstream import cores


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
