"""Count the calls that a piece of code makes: how much it does, without a clock."""

import sys


def calls_of(function):
    """Return how many Python and C functions `function()` calls, itself included."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 1  # setprofile itself
