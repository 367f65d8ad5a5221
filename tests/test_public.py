"""What is public, and what becomes of it: the list, and the promise of docs/upgrading.md."""

from __future__ import annotations

from tests.public import COMMAND, LIST, lines


def test_the_list_of_what_is_public_is_what_the_code_has() -> None:
    """Nothing public goes away or comes without a line of the list that says so."""
    listed, found = LIST.read_text().splitlines(), lines()

    assert sorted(set(listed) - set(found)) == [], f"gone; see docs/upgrading.md, then {COMMAND}"
    assert listed == found, f"new: run {COMMAND}"


def test_the_list_has_every_kind() -> None:
    """Names, arguments, methods, settings, commands, flags, metrics and codes are all in it."""
    listed = LIST.read_text().splitlines()
    kinds = (
        "carpool.Stage",
        "carpool.Stage(max_batch_size=)",
        "carpool.Handle.predict",
        "setting max_body_mb",
        "carpool serve --port",
        "carpool services add",
        "metric carpool_queue_length{model,stage}",
        "error overloaded",
    )
    assert [each for each in kinds if each not in listed] == []
