"""docs/api.md, the reference that is made from the docstrings."""

from __future__ import annotations

import importlib

import pytest

from bench.tools.api import COMMAND, MODULES, PAGE, page, public


def test_the_page_is_what_the_docstrings_say() -> None:
    """The page in the repository is the one that its command writes now."""
    assert PAGE.read_text() == page(), f"docs/api.md is stale: run {COMMAND}"


@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_says_what_it_is(name: str) -> None:
    """Each public class and function has a docstring of its own, and is on the page."""
    text = PAGE.read_text()
    found = public(importlib.import_module(name))
    assert found
    for each in found:
        assert f"### `{each.name}`\n" in text
        assert not callable(each.found) or each.found.__doc__, each.name
