"""Models that refuse items with statuses of their own, for workers that import nothing else."""

from __future__ import annotations

from carpool import HTTPError, Service, Stage


def refusal(word: str) -> HTTPError:
    if word == "gone":
        return HTTPError("this user has left", status=410, code="user_gone", headers={"X-Left": "May"})
    return HTTPError("the database is down", status=503, headers=[("Retry-After", "7")])


def guard(word: str) -> str:
    if word == "gone":
        raise refusal(word)
    return word


def answers(words: list[str]) -> list[int | Exception]:
    if "raised" in words:
        raise refusal("raised")
    return [refusal(word) if word == "down" else len(word) for word in words]


CHAIN = Service(Stage(guard), Stage(answers, max_batch_size=8), name="chain", timeout_s=20)


INSIDE = Service(Stage(guard, run_in="thread"), Stage(answers, run_in="thread", max_batch_size=8), name="inside")
