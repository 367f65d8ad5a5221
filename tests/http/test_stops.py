"""Texts at which an answer stops, wherever its parts are cut."""

from __future__ import annotations

import sys
from types import FrameType

from hypothesis import given
from hypothesis import strategies as st

from carpool.http.protocols.openai_text import Choice, ChoiceTerms
from carpool.openai import Delta
from tests.support.properties import PROPERTY

_TEXT = st.text("ab", min_size=1, max_size=6)


def _kept(stops: list[str], text: str) -> int:
    """Return how much of the end of a text may be the beginning of a stop, tried one by one."""
    lengths = range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)


@PROPERTY
@given(stops=st.lists(_TEXT, max_size=3), parts=st.lists(st.text("ab", max_size=8), max_size=12))
def test_all_is_told_but_what_may_begin_a_stop(stops: list[str], parts: list[str]) -> None:
    """However a text is cut into parts, all that cannot begin a stop is told, and nothing from the
    first stop on.
    """
    choice, held = Choice(ChoiceTerms(stops, None, None)), ""
    for part in parts:
        text, told = held + part, choice.add(Delta(part))
        ends = [text.find(stop) for stop in stops if stop in text]
        if ends:
            assert (told, choice.finish_reason) == (text[: min(ends)], "stop")
            return
        kept = _kept(stops, text)
        assert told == text[: len(text) - kept]
        held = text[len(text) - kept :]


def test_longer_stops_are_no_more_work() -> None:
    """A stop that is ten times as long, and all but comes, is no more work for each part."""

    def work(n: int) -> int:
        choice, lines = Choice(ChoiceTerms(["a" * n + "b"], None, None)), 0
        choice.add(Delta("a" * n))

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            for _ in range(100):
                choice.add(Delta("a"))
        finally:
            sys.settrace(before)
        return lines

    assert work(900) < 1.5 * work(90)
