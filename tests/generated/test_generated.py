"""Random training programs give the numbers of a plain loop, or raise an error of Slipstream."""

import pytest

from generated.programs import FIRST_NEW
from generated.run import PASSED, check

FEW = (0, 1, 3, 4, 5, 7, 14, 15, 17, 19, 100000, 100002, 100017, 100041, 100057)
MANY, CHUNK = 90, 10  # of each kind


def _verify(numbers):
    failures = []
    for number in numbers:
        program, result = check(number, inductor=False, small=True)
        if result.verdict not in PASSED:
            failures.append(f"seed {number}: {result.verdict}: {result.detail}\n  {program}")
    assert not failures, "\n".join(failures)


def test_programs_agree_with_a_plain_loop():
    _verify(FEW)


@pytest.mark.matrix
@pytest.mark.parametrize("first", [*range(0, MANY, CHUNK), *range(FIRST_NEW, FIRST_NEW + MANY, CHUNK)])
def test_more_programs_agree_with_a_plain_loop(first):
    _verify(range(first, first + CHUNK))
