"""The table of tested faults in docs/reliability.md has the rows of `ROWS`, and all tests named in `ROWS` exist."""

import ast
from collections import Counter
from functools import cache

import pytest
from tested_faults import END, ROOT, ROWS, START, markdown, outcomes


@cache
def functions(path):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted({name for names in ROWS.values() for name in names}))
def test_named_tests_exist(name):
    path, _, function = name.partition("::")
    found = functions(path)
    assert function in found if function else any(each.startswith("test_") for each in found)


def test_page_contains_each_row_and_no_failure():
    table = (ROOT / "docs/reliability.md").read_text().split(START)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert [tuple(row[:2]) for row in rows] == list(ROWS)
    assert all(int(row[2]) > 0 for row in rows)
    assert {row[3] for row in rows} == {"none"}


def test_cases_are_counted_by_file_and_function(tmp_path):
    log = tmp_path / "results.xml"
    case = '<testcase classname="tests.a.test_b" name="test_c[{}]"'
    log.write_text(f"<suite>{case.format(1)}/>{case.format(2)}><failure/></testcase></suite>")
    counts = Counter(passed=1, failed=1)
    assert outcomes([log]) == {"a/test_b.py": counts, "a/test_b.py::test_c": counts}
    assert "| 2 | 1 |" in markdown({"test_files.py": counts})
