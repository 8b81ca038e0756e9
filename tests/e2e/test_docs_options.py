"""Test that the pages on options match the code: settings are valid, and tables and outputs are current."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.cli.main import main
from slipstream.optim import build_optim_wrapper
from slipstream.registry import HOOKS
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.speed.plan import rules

RULES = rules(SpeedPlan(), Capabilities())
DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX = (DOCS / "options/README.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "options").glob("[!R]*.md"))}
FRONT_ENDS = ("`speed=`", "MMEngine", "SuperGradients")
HEADINGS = ("## What it does", "## When to use it", "## What it costs", "## Works with")
LONGEST = {"compile": 190, "ema": 70}  # maximum number of lines (other pages: 60)
INDEXED = dict(re.findall(r"^\| \[\w+\]\((\w+)\.md\) \| (.*?) \|", INDEX, re.MULTILINE))
SUPERGRADIENTS = {"optimizer", "optimizer_params"}  # only the Trainer reads these


def table(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, each as a list of cells."""
    section = text.split(f"## {heading}\n", 1)[1]
    rows = re.search(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", section, re.MULTILINE)[1]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def lines(page: str) -> list[tuple[str, str]]:
    """Return the front end and the code of each setting in the table at the top of a page."""
    rows = re.findall(r"^\| (`speed=`|MMEngine|SuperGradients) \| (.*) \|$", PAGES[page], re.MULTILINE)
    assert tuple(front_end for front_end, _ in rows) == FRONT_ENDS, page
    return [(front_end, code) for front_end, cell in rows for code in re.findall(r"`([^`]+)`", cell)]


LINES = [(page, *line) for page in PAGES for line in lines(page)]


def read_settings(code: str) -> dict:
    return eval(f"dict({code})", {"__builtins__": {"dict": dict, "float": float}})


def test_each_option_has_a_page_and_an_index_entry():
    listed = [name for names in INDEXED.values() for name in re.findall(r"`(\w+)`", names)]
    assert sorted(listed) == sorted([*SpeedPlan.options(), "auto"])
    assert sorted(INDEXED) == sorted(PAGES)


@pytest.mark.parametrize(("page", "front_end", "code"), LINES)
def test_setting_of_each_front_end_sets_an_option_of_its_page(page, front_end, code):
    settings = read_settings(code)
    plan = SpeedPlan.read(**settings)
    own = set(re.findall(r"`(\w+)`", INDEXED[page]))
    if page == "cuda_graph":
        own.add("compile")  # compile's mode also enables CUDA graphs
    if front_end == "`speed=`":
        assert set(settings) == {"speed"}
        assert plan.auto or own & set(plan.sources)
        return
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    if "optim_wrapper" in settings:
        wrapper = build_optim_wrapper(nn.ParameterList(parameters), settings["optim_wrapper"])
        assert type(wrapper.optimizer).__name__ in settings["optim_wrapper"]["optimizer"]["type"]
    hooks = [HOOKS.build(hook) for hook in settings.get("custom_hooks", ())]
    foreign = SUPERGRADIENTS & set(settings.get("training_params", ()))
    kernels = page in ("fused", "npu") and (foreign or "optim_wrapper" in settings)
    assert plan.auto or own & set(plan.sources) or hooks or kernels


def test_each_inline_snippet_is_valid():
    snippets = [
        code
        for text in [INDEX, *PAGES.values()]
        for code in re.findall(r"`((?:speed|cfg|env_cfg)=[^`]*)`", text)
        if "..." not in code and code != "speed="
    ]
    assert len(snippets) > 15
    for code in snippets:
        SpeedPlan.read(**read_settings(code))


def test_documented_errors_match_the_code():
    assert table(INDEX, "What raises an error") == [[f"`{r.option}`", r.message] for r in RULES[0]]


def test_documented_options_without_effect_match_the_code():
    assert table(INDEX, "What has no effect") == [[f"`{r.option}`", r.message] for r in RULES[1]]


def test_explain_prints_the_output_on_the_page(capsys, monkeypatch):
    ((command, expected),) = re.findall(
        r"```console\n\$ slipstream ([^\n]*)\n(.*?)```", PAGES["auto"], re.DOTALL
    )
    monkeypatch.setattr("slipstream.runner.builders.device_type", lambda: "cpu")
    monkeypatch.setenv("COLUMNS", "110")
    assert main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip("\n").splitlines()]
    while not printed[0]:
        printed.pop(0)
    assert printed == expected.splitlines()
