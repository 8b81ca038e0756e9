"""Test that the measured figures in README.md and docs/ match the JSON files in benchmarks/results/."""

import math
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import figures

TIMES = re.compile(r"\d ?(ms|µs|us|images/s)\b|\d ?[x×]([\s,;.)]|$)|\d times (as|faster|slower|the)\b")
UNCHECKED = {"data.md", "scaling.md"}
"""Pages that contain sizes, rules or predictions that look like measured times."""
PROSE = [
    figures.ROOT / "README.md",
    *(p for p in (figures.ROOT / "docs").rglob("*.md") if p.name not in UNCHECKED),
]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_pages_match_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert figures.render(text, page.name) == text, "the page is outdated; run python benchmarks/figures.py"


def test_every_region_occurs_on_a_page():
    used = {match[1] for page in figures.pages() for match in figures.MARK.finditer(page.read_text("utf-8"))}
    assert used == set(figures.REGIONS)


def test_changed_result_changes_the_page(monkeypatch):
    page = figures.ROOT / "docs/options/sync_bn.md"
    times = {**figures.result("sync_bn"), "one per pass": [400.0] * 15}
    monkeypatch.setattr(figures, "result", lambda name: times)
    new = figures.render(page.read_text(encoding="utf-8"), page.name)
    assert "| one per pass | 400.0 |" in new
    assert new != page.read_text(encoding="utf-8")


def test_every_case_of_a_result_is_in_its_table():
    for case in figures.result("overhead")["cases"]:
        assert f"{figures.NAMES[case['network']]}, {figures.loader_label(case)} |" in figures.overhead()
    for network in figures.result("one_graph")["milliseconds"]["The recipes' networks"]:
        assert f"| {figures.NAMES[network]} |" in figures.one_graph()
        assert f"`compile=True`, {figures.NAMES[network]} |" in figures.readme()


def test_readme_compares_decoders_on_the_same_work(monkeypatch):
    before, result = figures.readme(), figures.result
    rounds = [
        {name: {**times, "worker": 1e9} for name, times in found.items()}
        for found in result("data")["rounds"]
    ]
    monkeypatch.setattr(
        figures, "result", lambda name: {**result(name), **({"rounds": rounds} if name == "data" else {})}
    )
    assert figures.readme() == before  # the workers' time does not include all of Slipstream's work


def test_report_takes_less_than_one_percent_of_a_step():
    found = figures.result("report_overhead")
    per_step = [
        timer + reading / found["interval"]
        for timer, reading in zip(found["timer_us"], found["reading_us"], strict=True)
    ]
    assert max(per_step) < 0.01 * 1000 * min(found["step_ms"])


def test_ratio_is_computed_within_rounds():
    assert figures.ratio([1.0, 8.0, 3.0], [2.0, 4.0, 3.0]) == "1.00 (0.50 to 2.00)"
    with pytest.raises(ValueError, match="argument 2"):
        figures.ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- figures: fused -->\n", "a.md has no end"),
        ("<!-- figures: fused -->\n<!-- figures: data -->\n<!-- end -->", "a.md has no end"),
        (
            "<!-- figures: fuse -->\n<!-- end -->",
            "a.md contains the unknown region 'fuse'. Valid regions: readme,",
        ),
    ],
)
def test_wrong_region_raises_an_error(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        figures.render(text, "a.md")


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_prose_contains_no_measured_times(page):
    text = figures.MARK.sub("", page.read_text(encoding="utf-8"))
    prose = re.sub(
        r"^( {4}|```).*?(\n|^```$)", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M
    )
    assert not [line for line in prose.splitlines() if TIMES.search(line)], (
        "these lines contain measured times; let benchmarks/figures.py generate them"
    )


def test_explanations_quote_the_measured_ratios():
    from slipstream.speed import auto

    source = Path(auto.__file__).read_text(encoding="utf-8")
    low, high = re.search(r"step time by (\d+)% to (\d+)%", source).groups()
    ratios = [
        figures.median(figures.round_ratios(times[figures.GRAPH], times["loop"]))
        for times in figures.result("one_graph")["milliseconds"]["The recipes' networks"].values()
    ]
    assert int(low) == 10 * math.floor(10 * (1 - max(ratios)))
    assert int(high) == 10 * round(10 * (1 - min(ratios)))
