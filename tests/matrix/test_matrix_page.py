"""The page that shows the matrix says what the tests check."""

from matrix_page import PAGE, cell, render


def test_the_page_shows_what_the_tests_check():
    assert PAGE.read_text() == render(), "write it anew: python tests/matrix/matrix_page.py"


def test_cells_tell_refused_from_impossible_and_from_what_works():
    assert cell("bf16", "EMA", 1) == "✓"
    assert cell("bf16", "fp16", 1) == "1/2"
    assert cell("compile=step", "FSDP2", 2) == "✗"
    assert cell("FSDP2", "fused", 2) == "✓/✗"
