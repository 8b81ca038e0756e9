"""The API reference lists existing objects with docstrings, and all public names."""

import inspect
import pkgutil
import re

import pytest
from doc_pages import text_of

import slipstream

NAMES = re.findall(r"^\| `(slipstream\.[\w.]+)` \|", text_of("docs/api.md"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_listed_object_exists_and_has_a_docstring(name):
    found = pkgutil.resolve_name(name)
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__doc__


def test_every_public_name_of_the_package_is_listed():
    assert {f"slipstream.{name}" for name in slipstream.__all__} - set(NAMES) == {"slipstream.__version__"}


def test_every_table_of_names_is_followed_by_its_reference():
    sections = re.split(r"^## ", text_of("docs/api.md"), flags=re.MULTILINE)[1:]
    assert len(sections) > 3
    assert all(section.rstrip().endswith("<!-- api -->") for section in sections)
