"""Runs that are stopped or damaged at random resume with the same results or report an error.

`make faults` tests thousands of such runs.
"""

import pytest

from faults.interruptions import FAULTS, markdown, run


@pytest.mark.slow
def test_no_fault_loses_results_or_changes_a_number_silently():
    problems = []
    table = run(count=4 * len(FAULTS), seed=0, report=problems.append)
    assert not any(counts["lost"] or counts["silent"] for counts in table.values()), "\n".join(problems)
    assert sum(counts["same result"] for counts in table.values()) >= 3 * len(FAULTS), markdown(table)
