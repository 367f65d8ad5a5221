"""The glossary: one word for one thing, in code, docs and messages.

A word with classes names these and no others (`tests/test_glossary.py`); `python -m tests.pages` writes
docs/glossary.md from this table. A new word needs a row here, and one struck out.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Word(NamedTuple):
    """A word, the classes that it names, separated by spaces, and its meaning."""

    word: str
    classes: str
    meaning: str


GLOSSARY: Final = (
    Word("item", "", "the input of one request and of the model, opaque to carpool"),
    Word("request", "Request", "one item on its way through a service, until its caller has the answer"),
    Word("caller", "Caller", "receives the answer to one request: a future, a thread, a place in a stream"),
    Word(
        "service",
        "Service",
        "stages in a row, or in a graph, with common settings, as the user declares them; it can be run many times",
    ),
    Word("handle", "Handle AsyncHandle", "a running service, for threads and for tasks"),
    Word(
        "stage",
        "Stage",
        "one model and its settings, as the user declares them; as an int, the position of the stage in its service",
    ),
    Word("core", "Core", "the stages of one driver, and their services: all decisions, no waiting"),
    Word("flow", "Flow", "a service in the core: its graph, its doors, its one admission, its counts"),
    Word("node", "Node", "a place in the graph of a service at which requests wait for a stage; its successor is data"),
    Word(
        "element",
        "Parallel Route ForEach",
        "what a graph is declared of: a stage, a line of elements, branches, a route or a list",
    ),
    Word("turn", "Done To", "the word of a model on where its result goes: an early answer, or the name of a branch"),
    Word(
        "child",
        "Siblings",
        "a request that a fork or a list has made of another request; it is joined with its siblings in the end",
    ),
    Word(
        "lobby",
        "Lobby",
        "the waiting requests of one stage: its queue, their deadlines, and the policy that decides when they go",
    ),
    Word(
        "crew",
        "",
        "the workers of one stage, and their batches or streams: a batcher or a stepper, which owns a lobby",
    ),
    Word(
        "batcher",
        "Batcher",
        "the crew of a stage that answers in batches: the batches of its workers, and the next batch",
    ),
    Word("queue", "Queue", "the requests that wait in one stage"),
    Word("lane", "Lane", "requests of one priority, key and bucket, which may share a batch"),
    Word(
        "batch",
        "Batch",
        "requests that a worker runs in one call of the model; a batch ahead lies in the socket of a "
        "worker that is still busy with another",
    ),
    Word(
        "stream",
        "Stream Delivery",
        "the progress of a request whose answer is made step by step, in the core and on its way to an "
        "HTTP client; among steps, the request itself",
    ),
    Word(
        "stepper",
        "Stepper",
        "the crew of a stage of steps: which streams join and leave which running set, and when",
    ),
    Word("running set", "RunningSet", "the streams that one worker steps together; an order changes it"),
    Word(
        "part",
        "Parts",
        "the output of one step for one stream, in columns with those of the others; the pace is the "
        "time between the due times of two parts",
    ),
    Word("policy", "Policy", "decides when a batch goes and how large it is"),
    Word("decision", "Decision", "the answer of a policy: the batch that goes now, or the time of the next question"),
    Word("deadline", "", "the time after which no caller waits for a request; it then expires"),
    Word("due", "", "the time by which a request should be answered, by its SLO or its deadline"),
    Word("SLO", "", "the latency that a service promises; goodput counts the answers within it"),
    Word(
        "driver",
        "Driver LineDriver VirtualDriver BusyDriver",
        "reports events to the core and performs its actions: on an event loop, in callers' threads, in virtual time",
    ),
    Word("worker", "Worker", "a process, thread or task that holds a model and answers one batch at a time"),
    Word("pool", "WorkerPool BatchPool StepPool TaskPool", "the workers of one stage"),
    Word(
        "place",
        "",
        "the number of a worker in its stage; after a death a new worker takes the place, after any other "
        "end the place is gone",
    ),
    Word(
        "newcomer",
        "",
        "a worker that was added while its service runs, until it is admitted: its death fails no request",
    ),
    Word("roster", "Roster", "decides when the workers of a stage are started, replaced and given up"),
    Word(
        "gate",
        "Gate Strangers",
        "where workers that come from elsewhere connect, and prove that they may; those that have not are strangers",
    ),
    Word("guest", "", "a worker that joined by itself; nothing is started in its place when it leaves"),
    Word("frame", "Frame", "one message between a service and a worker process"),
    Word("payload", "", "the bytes of one item or result in a frame"),
    Word("reply", "Reply", "the answers of a worker to its batch, or to a part of it"),
    Word(
        "line",
        "Line",
        "the callers of a batch function in threads; the thread of one of them, the leader, runs a batch "
        "for the others; a slot is the place of one of the batches that may run at a time",
    ),
    Word("ticket", "Ticket", "an item in the line of a batch function whose result is fetched later"),
    Word("exchange", "Exchange", "one request over HTTP and its answer; our own server and ASGI have a kind each"),
    Word(
        "protocol",
        "HttpProtocol",
        "another server's way to ask and answer over HTTP, which ours speaks besides its own; a submission is "
        "the items of one such request",
    ),
    Word("bulk", "BulkItems", "a request of any number of lines, an item each, answered while it is being sent"),
    Word("suspect", "Suspect", "a request whose worker was lost: it runs once more, alone"),
    Word("door", "Door", "where requests wait, outside of all queues, until there is room where they begin"),
    Word(
        "lot",
        "",
        "the requests that one caller waits for as a whole, which are admitted together or not at all: "
        "mostly a single one",
    ),
    Word(
        "allowance",
        "Allowance",
        "the number of items, values and bytes that a reader may make of one body; it counts before it makes them",
    ),
    Word(
        "share",
        "",
        "a guarantee: to a service, of its server's connections and memory for bodies; to a connection, of that memory",
    ),
    Word("refuse", "", "not to admit a new request; to drop is to end a queued one unserved"),
    Word(
        "coordinator",
        "Coordinator",
        "the process that has a service's loop and core; the parent of its worker processes",
    ),
)
