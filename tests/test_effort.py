"""The quick run of the tests and the thorough one."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from types import SimpleNamespace

import pytest

from tests import effort
from tests.effort import is_slow, share, slow_where
from tests.support.properties import PROPERTY
from tests.support.sources import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> str:
    """What a target of the Makefile runs."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, target
    return found[1]


@pytest.mark.parametrize(("of", "quick"), [(10_000, 800), (100, 16), (60, 16), (16, 16), (3, 3)])
def test_a_share_is_a_twelfth_but_not_less_than_sixteen(of: int, quick: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick run tries a twelfth of the examples, but at least sixteen, or all where there are
    fewer; a thorough one tries all.
    """
    for max_examples, expected in ((8, quick), (effort.WHOLE, of)):
        monkeypatch.setattr(effort, "settings", SimpleNamespace(default=SimpleNamespace(max_examples=max_examples)))
        assert share(of) == expected


def test_properties_know_how_much_the_run_tries() -> None:
    """`PROPERTY` is made once the profile of the run is loaded: made before, it would try all in the quick run, too."""
    assert PROPERTY.max_examples == int(os.environ.get("FUZZ_EXAMPLES") or share(200))


def test_a_condition_sees_the_parameters_that_it_names() -> None:
    """The condition of `slow_where` is called with the parameters that it names, and other
    parameters of the case do not matter.
    """
    mark = slow_where(lambda n, kind: n > 2 and kind == "dear").mark

    assert is_slow(mark, {"n": 3, "kind": "dear", "other": 1})
    assert not is_slow(mark, {"n": 3, "kind": "cheap", "other": 1})


def test_no_property_says_by_itself_how_many_examples_it_tries() -> None:
    """A number that is written at a test would be tried whole in the quick run, too: `examples` takes it instead."""
    own = {ROOT / "tests" / name for name in ("conftest.py", "effort.py", "test_effort.py", "support/properties.py")}
    others = [path for path in (ROOT / "tests").rglob("*.py") if path not in own and "max_examples" in path.read_text()]
    found = {
        f"{path.relative_to(ROOT)}:{node.value.lineno}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "max_examples"
    }
    assert found == set()


def test_make_test_is_the_quick_run_and_make_test_all_the_thorough_one() -> None:
    """What is slow is left out by default, and by `make test`; `make test-all` and `make fuzz` leave out nothing."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]

    assert "-m 'not slow and not long and not ray'" in options
    assert "-m" not in recipe("test").partition("pytest")[2]
    assert '-m "not ray"' in recipe("test-all") and "$(MAKE) test-ray" in recipe("test-all")
    assert '-m "long or not long"' in recipe("fuzz")


def test_continuous_integration_lints_and_tests() -> None:
    """CI runs the commands that the README and CONTRIBUTING name."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()

    assert [line for line in lines if line.startswith("make")] == ["make lint", "make test", "make docs"]
