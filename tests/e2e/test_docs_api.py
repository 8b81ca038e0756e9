"""Test that the API reference lists all public names, and that the listed objects exist and have docstrings."""

import pkgutil
import re

import pytest
from doc_pages import text_of

import slipstream

NAMES = re.findall(r"^\| `(slipstream\.[\w.]+)` \|", text_of("docs/api.md"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_listed_object_exists_and_has_a_docstring(name):
    found = pkgutil.resolve_name(name)
    assert callable(found)
    assert found.__doc__


def test_every_public_name_of_the_package_is_listed():
    listed = {name.rpartition(".")[2] for name in NAMES}
    assert set(slipstream.__all__) - listed == {"__version__"}


def test_every_table_of_names_is_followed_by_its_reference():
    sections = re.split(r"^## ", text_of("docs/api.md"), flags=re.MULTILINE)[1:]
    assert len(sections) > 3
    assert all(section.rstrip().endswith("<!-- api -->") for section in sections)
