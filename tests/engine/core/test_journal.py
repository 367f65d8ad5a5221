"""The journal: what happened to one request, in order, as long as it is remembered."""

from __future__ import annotations

from carpool.engine.core.core import Core
from carpool.engine.core.graph import Each, Fork
from carpool.engine.core.journal import Journal
from carpool.errors import ModelError, Unavailable
from tests.support.pipelines import ask, asks, pipeline_of, reply, stage


def told(journal: Journal, request_id: int) -> list[str]:
    return [str(entry) for entry in journal.story(request_id)]


def two_stages() -> tuple[Core, Journal]:
    journal = Journal()
    return pipeline_of(stage(1, name="decode", max_size=1), stage(name="infer"), journal=journal, workers=2), journal


def test_a_request_has_a_story() -> None:
    """The journal tells all that happened to a request, in order, with the seconds since it came,
    stages and batches.
    """
    core, journal = two_stages()
    core.flow.submit(1, asks("ab"))
    (first,) = core.poll(2).run
    reply(core, 3, first)
    (second,) = core.poll(4).run
    reply(core, 5, second)

    assert told(journal, 1) == [
        "0.000000 admitted",
        "1.000000 runs decode batch 1 of 1 on worker 1 (full)",
        "2.000000 passed decode",
        "3.000000 runs infer batch 1 of 1 on worker 1 (free)",
        "4.000000 answered",
    ]
    assert [entry.at for entry in journal.story(1)] == [1, 2, 3, 4, 5]


def test_a_story_may_begin_at_the_door_and_end_badly() -> None:
    """The journal also tells of waiting at the door, of a lost worker, and of an error at the end."""
    core, journal = two_stages()
    core.worker_lost(0, 0, 1)
    core.flow.submit(1, asks("ab", patient=True))
    (batch,) = core.poll(2).run
    reply(core, 3, batch, errors={0: ModelError("boom")})
    (batch,) = core.poll(4).run
    core.worker_lost(5, 0, batch.place)
    core.abort(6, Unavailable("over"))

    assert told(journal, 1)[-1] == "2.000000 failed: boom"
    assert told(journal, 2) == [
        "0.000000 waits for room",
        "1.000000 let in",
        "3.000000 runs decode batch 2 of 1 on worker 0 (full)",
        "4.000000 worker lost, queued again, alone decode",
        "5.000000 failed: over",
    ]


def test_a_story_may_end_with_its_caller() -> None:
    """The journal of a request that is cancelled ends with its caller's leaving."""
    core, journal = two_stages()
    request = ask("a")
    core.flow.submit(1, [request])
    core.cancel(2, request)

    assert told(journal, 1) == ["0.000000 admitted", "1.000000 cancelled"]


def test_the_journal_is_bounded() -> None:
    """When the journal is full its oldest entries are dropped first, and the seconds of a story count
    from the first that is left.
    """
    journal = Journal(max_entries=3)
    for now in range(5):
        journal.record(now, f"event {now}", request_id=now % 2)

    assert told(journal, 0) == ["0.000000 event 2", "2.000000 event 4"]
    assert told(journal, 1) == ["0.000000 event 3"]


def test_with_a_journal_nothing_else_changes() -> None:
    """With a journal the same requests get the same answers as without one."""

    def run(journal: Journal | None) -> list[object]:
        core = pipeline_of(stage(2, max_size=4), stage(3, max_size=3), workers=2, journal=journal)
        requests = asks(range(12), patient=True)
        core.flow.submit(0, requests)
        for now in range(12):
            for batch in core.poll(now).run:
                reply(core, now, batch)
        return [(r.result, r.id, r.admitted, r.arrived) for r in requests]

    assert run(Journal()) == run(None)


def test_branches_are_in_the_story_of_their_request() -> None:
    """What happens to a request in branches and in lists is in its one story, with the names of the
    branches and the numbers of items.
    """
    journal = Journal()
    tell, spell = stage(name="tell"), stage(name="spell")
    core = pipeline_of(tell, spell, declared=Fork([[tell], [Each(spell)]], names=("a", "b")), journal=journal)
    core.flow.submit(1, [ask(["x", "y"])])
    first = core.poll(1).run
    for batch in first:
        reply(core, 2, batch)
    core.poll(2)

    assert told(journal, 1) == [
        "0.000000 admitted",
        "0.000000 goes on as 2",
        "0.000000 goes on as 2 (b)",
        "0.000000 runs tell (a) batch 1 of 1 on worker 0 (free)",
        "0.000000 runs spell (b/0) batch 1 of 2 on worker 0 (free)",
        "0.000000 runs spell (b/1) batch 1 of 2 on worker 0 (free)",
        "1.000000 passed tell (a)",
        "1.000000 passed spell (b/0)",
        "1.000000 passed spell (b/1)",
        "1.000000 is joined (b)",
        "1.000000 is joined",
        "1.000000 answered",
    ]
