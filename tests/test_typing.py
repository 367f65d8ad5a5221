"""Type checkers see `A -> B`: mypy and pyright over a file of assertions, and over mistakes that they must find.

The programs of README, docs and examples are checked by `make lint` (`tests/typing/programs.py`).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from carpool.batch_function import decorator
from carpool.batch_function.base import Settings
from carpool.engine.policy import BY_NAME, STEPS_BY_NAME, PolicyName
from tests.effort import slow_where
from tests.typing.checkers import mypy, pyright
from tests.typing.programs import PAGES, ROOT, programs

FOLDER = Path(__file__).parent / "typing"
RIGHT = [FOLDER / "batched.py", FOLDER / "services.py"]
MISTAKES = FOLDER / "mistakes.py"
CHECKERS = ("mypy", "standard", "strict")


def check(checker: str, files: list[Path], folder: Path) -> tuple[int, str]:
    """Have some files checked by mypy, or by pyright in one of its modes."""
    if checker == "mypy":
        return mypy(files, folder, folder / "cache")
    return pyright(files, checker, folder, folder / "pyrightconfig.json")


@slow_where(lambda checker: checker != "standard")
@pytest.mark.parametrize("checker", CHECKERS)
def test_types_of_models_and_batched_functions(checker: str, tmp_path: Path) -> None:
    """In mypy and pyright every `assert_type` holds, and models are written as users like to without an error."""
    code, text = check(checker, RIGHT, tmp_path)

    assert code == 0, text


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "standard"])
def test_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    """Each line that is wrong is reported, and no other one, so the test above is able to fail."""
    _, text = check(checker, [MISTAKES], tmp_path)
    lines = MISTAKES.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    found = {int(number) for number in re.findall(r"mistakes\.py:(\d+):.*error", text)}

    assert found == wrong, text


def test_the_names_of_policies_are_known_to_type_checkers() -> None:
    """The literals of `policy=` are the policies that there are, for whole answers and for parts."""
    assert set(get_args(PolicyName)) == set(BY_NAME) | set(STEPS_BY_NAME)


def test_a_decorator_takes_the_functions_that_batch_takes() -> None:
    """The overloads of `batch(f)` are those of `batch(...)(f)`, and `BatchSettings` has the settings."""
    body = ast.parse(inspect.getsource(decorator)).body
    (methods,) = [each.body for each in body if isinstance(each, ast.ClassDef) and each.name == "Decorator"]
    of_batch, of_decorator = (
        [f"{ast.unparse(each.args).removeprefix('self, ')} -> {ast.unparse(each.returns)}" for each in functions(found)]
        for found in (body, methods)
    )
    assert [each for each in of_batch if not each.startswith("function: None")] == of_decorator
    of_merge = {"merge", "split", "run_in"}
    assert decorator.BatchSettings.__annotations__.keys() | of_merge == {each.name for each in fields(Settings)}


def functions(body: list[ast.stmt]) -> Iterator[Any]:
    """Yield the overloads of `batch`, or of the `__call__` of a class."""
    for each in body:
        if isinstance(each, ast.FunctionDef) and each.name in ("batch", "__call__") and each.decorator_list:
            yield each


def test_the_programs_of_all_pages_are_found() -> None:
    """What `make lint` checks are the programs of the README and of the docs."""
    found = {str(page.relative_to(ROOT)): len(programs(page)) for page in PAGES}

    assert found["README.md"] >= 1 and found["docs/ways.md"] >= 6 and found["docs/coming_from.md"] >= 6
