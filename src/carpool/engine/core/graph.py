"""Where requests go: the graph of a service.

A result at a node goes on to `node.after`, which is one of these:

* None: it is the answer;
* a `Node`: it waits for that node's stage;
* a `Switch`: it goes on to one of several, by name;
* a `Fork`: it goes on to all of several, each time as a request of its own (a child), and what
  they come to goes on together;
* an `Each`: it is a list, and each of its items goes on as a child; what they come to goes on
  together;
* `JOIN`: it is what a child has come to.

So a line is nodes whose `after` are nodes, and a switch costs no more than a line: its ways end in
what follows it. Only forks make further requests.

**Room.** A node may hand a request to a worker only if there is room for what it becomes. It
*needs* the nodes at which that may come to wait: those directly after it, through all ways of a
switch, and the heads of a fork's branches; and besides, what follows a fork, once its branches are
joined. The last nodes of the branches need nothing for that: the room behind the join is taken
before the fork.

    vacancy(m) = size of m's queue - waiting at m - running at what needs m - forks open before m

**No deadlock.** Put the nodes in a line in which each comes before what it needs. Whoever has taken
room at m waits at m, runs at a node that needs m, or is inside a fork before m: in all cases it is
*after* the node that took the room, or with a worker. Suppose that requests wait and nothing moves,
and look at the last node n of that line at which one waits. The room that n needs, at some m, is
taken by requests that wait after n, of which there are none, or that are with workers, which answer
or are replaced. So n can go on. This holds for stages with several nodes, since room is counted by
node, and since what has no room stands in nobody's way: its lanes are passed over. An `Each` takes
its items in at its door, one by one, as there is room at the heads of its body, which drains by the
same argument; and a node before it waits while anyone is at that door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, Union

from carpool.engine.core.queue import Queue
from carpool.engine.core.times import Times
from carpool.engine.request import Request


class NodeWorkers(Protocol):
    """The workers of a stage and what waits for them, as far as graphs go; `running` is how many
    requests workers have been handed and have not answered.
    """

    name: str
    queue: Queue
    times: Times
    running: int

    @property
    def owed(self) -> Sequence[Request]:
        """The requests that workers have and whose callers wait."""

    def predicted_wait_s(self, now: float, units_before: float) -> float:
        """Return how long a request waits that has `units_before` units queued before it."""


class _End:
    """The end of a branch, or of the body of an `Each`."""

    def __repr__(self) -> str:
        return "JOIN"


JOIN: Final = _End()
"""Follows the last node of a branch of a fork, or of the body of an `Each`."""


class Node:
    """A place in the graph of a service at which requests wait for a stage.

    Attributes:
        crew: The workers of the stage, and the queue in front of them.
        after: What becomes of results.
        block: The fork or `Each` in which it is; None if it is in none.
        needs: The nodes at which what becomes of a result may come to wait, one at each.
        sources: Who may send requests here: nodes by what runs there, forks by what is inside.
        doors: Of each `Each` directly after it.
        behind: The queue of the node after it, if it is the only one that sends requests there, and
            all that there must be room in; else None.
        most_room: The most requests that can ever be handed to workers here at once.
        begins: Whether the requests of its service begin here, all of them and no others.
        is_first: Whether some of them begin here.
        is_last: Whether all results are answers.
        came: How many requests have come here, where its stage has other nodes besides.
        ahead_s: Expected seconds from the arrival here to the answer.
        onward_s: The same from when a result is there.
        ends: Whether results are answers, or parts of them.
        spot: The index of its `Spot` (`worker/own.py`) among those that the stage's workers have.
        ways: All ways on, where a switch follows; else empty.
        unserved_since: Since when no request can come from here to its answer, as a stage on every
            way has had no worker; infinity if one can.
    """

    def __init__(self, crew: NodeWorkers, flow: Any, after: After, block: Block | None) -> None:
        self.crew: Any = crew
        self.name = crew.name
        self.flow = flow
        self.after = after
        self.block = block
        self.needs: list[Node] = []
        self.sources: list[Node | Block] = []
        self.doors: list[Each] = []
        self.behind: Queue | None = None
        self.most_room = inf
        self.begins = self.is_first = self.is_shared = self.is_held = False
        self.is_last = after is None
        self.ends = after is None or (after is JOIN and block is not None and block.ends)
        self.spot = self.came = 0
        self.ways: list[Onward] = []
        self.ahead_s = self.onward_s = 0.0
        self.unserved_since = inf

    def __repr__(self) -> str:
        return f"<Node {self.name}>"

    def settle(self) -> None:
        """Work out what depends on the other nodes of its stage, and of those that follow."""
        self.is_shared = self.crew.lobby.is_shared
        self.begins = self.begins and not self.is_shared
        self.behind = None
        if len(self.needs) == 1 and not self.doors:
            (other,) = self.needs
            if len(other.sources) == 1 and not other.crew.lobby.is_shared and not other.is_first:
                self.behind = other.crew.queue

    @property
    def is_in_line(self) -> bool:
        """Whether all that leaves it goes to one place, which gets nothing else."""
        after = self.after
        return not self.is_shared and (after is None or (type(after) is Node and self.behind is not None))

    @property
    def entered(self) -> int:
        entered: int = self.crew.lobby.entered
        return self.came if self.is_shared else entered

    @property
    def queued(self) -> int:
        queue: Queue = self.crew.queue
        return queue.of_source(self)[0] if self.is_shared else queue.count

    @property
    def nbytes(self) -> int:
        queue: Queue = self.crew.queue
        return queue.of_source(self)[1] if self.is_shared else queue.nbytes

    @property
    def running(self) -> int:
        crew: NodeWorkers = self.crew
        return sum([request.node is self for request in crew.owed]) if self.is_shared else crew.running

    def expected_s(self, now: float) -> float:
        """Return how long a request that came now would spend here, its batch included."""
        crew: NodeWorkers = self.crew
        if not crew.running and not crew.queue.count:
            return crew.times.fastest_s
        return crew.predicted_wait_s(now, crew.queue.size) + crew.times.usual_s

    def vacancy(self) -> float:
        return 0 if self.nbytes >= self.crew.queue.max_bytes else self.places()

    def places(self) -> float:
        queue: Queue = self.crew.queue
        taken = self.queued
        for source in self.sources:
            taken += source.running
        return queue.max_size - taken

    def room(self) -> float:
        if self.is_held:
            return 0
        for each in self.doors:
            if each.door.queue.count:
                return 0
        return min([node.vacancy() for node in self.needs], default=inf)


class Door:
    """Where requests wait for room outside of all queues; without a limit of its own. If it does
    not lead into the service, it leads into the body of an `Each`.

    Attributes:
        heads: The nodes at which those come to wait first that begin here.
        needs: The nodes at which there must be room for those that go on.
        behind: The queue behind it, if it is the only way into that, and there is no other; else
            None.
    """

    name = "the door"

    def __init__(self, flow: Any, start: After, begins: bool) -> None:
        self.flow = flow
        self.queue = Queue()
        self.start = start
        self.begins = begins
        self.heads = heads(start, every=False) if begins else []
        self.behind: Queue | None = None
        self.needs, self._lists = needs_of(start)

    def has_room(self, nbytes: int = 0, n: int = 1, beside: Mapping[Node, Sequence[Request]] | None = None) -> bool:
        """Report whether `n` requests, of `nbytes` in all, may go on; `beside` is by node what else
        needs room there, as it comes by other doors.
        """
        if self.begins and self.flow.is_held:
            return False
        if self.behind is not None:
            return self.behind.has_room(nbytes, n)
        for each in self._lists:
            if each.door.queue.count:
                return False
        for node in self.needs:
            others = beside.get(node, ()) if beside else ()
            here = n + len(others)
            if node in self.heads:  # what comes to it is known
                here_bytes = nbytes + sum([request.nbytes for request in others])
                if node.places() < here or node.nbytes + here_bytes > node.crew.queue.max_bytes:
                    return False
            elif node.vacancy() < here:
                return False
        return True


class OnTheWay:
    """Where the requests of a service are that have left a node and not come to the next one."""

    name = "nowhere"
    begins = False

    def __init__(self, flow: Any) -> None:
        self.flow = flow


class Fork:
    """Branches that all get the same item.

    Args:
        branches: Each of them, as it is declared.
        names: Of the branches, if what they come to is a mapping; else it is a tuple.
        keeps_errors: Whether what a model or a lost worker has cost a branch is its result.

    Attributes:
        ends: Whether what they come to is the answer, or a part of it.
        running: How many requests have children inside.
    """

    is_tuple = True
    ends = False

    def __init__(
        self, branches: Sequence[Declared], names: Sequence[str] | None = None, *, keeps_errors: bool = False
    ) -> None:
        self.declared = branches
        self.names = names
        self.keeps_errors = keeps_errors
        self.branches: list[After] = []
        self.running = 0
        self.then: After = None
        self.block: Block | None = None


class Each:
    """A body that gets each item of a list of `most` at most; those for which there is no room in
    it yet are at its door. For the other attributes see `Fork`.
    """

    door: Door

    is_tuple = ends = keeps_errors = False
    names = None

    def __init__(self, body: Declared, most: float = inf) -> None:
        self.declared = body
        self.most = most
        self.body: After = None
        self.running = 0
        self.then: After = None
        self.block: Block | None = None


class Switch:
    """Several ways on by name, of which one is taken.

    Without `choose` results name it themselves. One that `refuses` fails what comes where there is
    no room; else there is always room, as what is before it waits for room on all ways. `then` is
    what follows all of them.
    """

    def __init__(
        self, ways: Mapping[str, Declared], choose: Callable[[Any], str] | None = None, *, refuses: bool = False
    ) -> None:
        self.declared = ways
        self.choose = choose
        self.refuses = refuses
        self.ways: dict[str, After] = {}
        self.then: After = None


class Onward(NamedTuple):
    """One way on from a place, through all switches that follow, one of which may refuse what there
    is no room for.

    As the turn of a result (`Reply.turns`) it says that the result takes this way.
    """

    after: After
    refuses: bool


Block: TypeAlias = Fork | Each
"""What has children of a request in it, until they are joined."""

After: TypeAlias = Node | Fork | Each | Switch | _End | None
Declared: TypeAlias = Union[NodeWorkers, Fork, Each, Switch, "Sequence[Declared]"]
"""What a graph is made of: a stage, or what takes its place, or a sequence of these, one after the
other."""


class Graph:
    """The places of one service, linked to each other. Each `Fork`, `Each` and `Switch` is for this
    graph alone.

    Attributes:
        nodes: The last ones first: each comes before those that need it.
        blocks: Its forks and lists, likewise.
    """

    def __init__(self, declared: Declared, flow: Any) -> None:
        self.nodes: list[Node] = []
        self.blocks: list[Fork | Each] = []
        self._flow = flow
        self.start = start = self._link(declared, None, None)
        for node in self.nodes:
            node.needs, node.doors = needs_of(node.after)
            for other in node.needs:
                other.sources.append(node)
            node.ways = ways_of(node.after) if isinstance(node.after, Switch) else []
        for block in self.blocks:
            for other in needs_of(block.then)[0]:
                other.sources.append(block)
        for block in self.blocks:
            if isinstance(block, Each):
                block.door = Door(self._flow, block.body, begins=False)
        for node in heads(start):
            node.is_first = True
        for node in self.nodes:
            node.most_room = min([other.crew.queue.max_size for other in node.needs], default=inf)
        if isinstance(start, Node) and not start.sources:
            start.begins = True

    def _link(self, declared: Declared, after: After, block: Block | None) -> After:
        if isinstance(declared, Fork):
            declared.then, declared.block, declared.ends = after, block, _ends(after, block)
            declared.branches = [self._link(branch, JOIN, declared) for branch in declared.declared]
            self.blocks.append(declared)
            return declared
        if isinstance(declared, Each):
            declared.then, declared.block, declared.ends = after, block, _ends(after, block)
            declared.body = self._link(declared.declared, JOIN, declared)
            self.blocks.append(declared)
            return declared
        if isinstance(declared, Switch):
            declared.then = after
            declared.ways = {name: self._link(way, after, block) for name, way in declared.declared.items()}
            return declared
        if isinstance(declared, Sequence):
            for each in reversed(declared):
                after = self._link(each, after, block)
            return after
        node = Node(declared, self._flow, after, block)
        self.nodes.append(node)  # what comes later is linked first
        return node

    def look_ahead(self, now: float) -> None:
        """Work out for each node what its requests will still need."""
        for node in self.nodes:
            node.onward_s = ahead_s(node.after, node.block)
            node.ahead_s = node.onward_s + node.expected_s(now)


def _ends(after: After, block: Block | None) -> bool:
    return after is None or (after is JOIN and block is not None and block.ends)


def needs_of(after: After, every: bool = False) -> tuple[list[Node], list[Each]]:
    """Return where what goes on to `after` may come to wait, and the lists that it may be; with
    `every`, also behind switches that refuse.
    """
    if isinstance(after, Node):
        return [after], []
    needs: dict[Node, None] = {}
    lists: list[Each] = []
    parts: list[After] = []
    if isinstance(after, Switch):
        parts = [] if after.refuses and not every else [*after.ways.values()]
    elif isinstance(after, Fork):
        parts = [after.then, *after.branches]
    elif isinstance(after, Each):
        parts, lists = [after.then], [after]
    for part in parts:
        of_part, lists_of_part = needs_of(part, every)
        needs.update(dict.fromkeys(of_part))
        lists += lists_of_part
    return list(needs), lists


def heads(after: After, every: bool = True) -> list[Node]:
    """Return the nodes at which what goes on to `after` comes to wait first, without its items;
    with `every`, also behind switches that refuse.
    """
    if isinstance(after, Node):
        return [after]
    if isinstance(after, Fork):
        return [head for branch in after.branches for head in heads(branch, every)]
    if isinstance(after, Switch) and (every or not after.refuses):
        return [head for way in after.ways.values() for head in heads(way, every)]
    return []


def all_after(node: Node) -> list[Node]:
    """Return the nodes to which results of a node may come directly, also through a join."""
    after, block = node.after, node.block
    found, lists = needs_of(after, every=True)
    while after is JOIN and block is not None:
        after, block = block.then, block.block
        found += needs_of(after, every=True)[0]
    for each in lists:
        found += needs_of(each.body, every=True)[0]
    return found


def with_room(requests: Sequence[Request]) -> list[Request]:
    left: dict[Node, float] = {}
    found = []
    for request in requests:
        needs = request.node.needs
        for node in needs:
            if node not in left:
                left[node] = node.vacancy()
        if all(left[node] >= 1 for node in needs):
            for node in needs:
                left[node] -= 1
            found.append(request)
    return found


def ways_of(after: After, refuses: bool = False) -> list[Onward]:
    """Return what requests may come to from a place, once no switch is left before them."""
    if isinstance(after, Switch):
        refuses = refuses or after.refuses
        return [found for way in after.ways.values() for found in ways_of(way, refuses)]
    return [Onward(after, refuses)]


# -- how long it takes from here


def ahead_s(after: After, block: Block | None) -> float:
    """Return the expected seconds from `after`, in a block, to the answer; by the longest way."""
    if isinstance(after, Node):
        return after.ahead_s
    if isinstance(after, Switch):
        return max([ahead_s(way, block) for way in after.ways.values()], default=0.0)
    if isinstance(after, Fork):
        return max([ahead_s(branch, after) for branch in after.branches], default=ahead_s(after.then, after.block))
    if isinstance(after, Each):
        return ahead_s(after.body, after)
    return 0.0 if block is None or after is None else ahead_s(block.then, block.block)


def fastest_s(after: After, block: Block | None = None) -> float:
    """Return the least seconds from `after` to the answer; of a fork the slowest branch counts."""
    if isinstance(after, Node):
        times: Times = after.crew.times
        return times.fastest_s + fastest_s(after.after, after.block)
    if isinstance(after, Switch):
        return min([fastest_s(way, block) for way in after.ways.values()], default=0.0)
    if isinstance(after, Fork):
        return max([fastest_s(branch, after) for branch in after.branches], default=fastest_s(after.then, after.block))
    if isinstance(after, Each):
        return fastest_s(after.then, after.block)  # the list may be empty
    return 0.0 if block is None or after is None else fastest_s(block.then, block.block)


def unserved_since(after: After, block: Block | None = None) -> float:
    """Return since when no request can come from `after` to its answer; infinity if one can.

    The nodes after it must have been looked at already.
    """
    if isinstance(after, Node):
        return after.unserved_since
    if isinstance(after, Switch):
        return max([unserved_since(way, block) for way in after.ways.values()], default=inf)
    if isinstance(after, Fork):
        behind = unserved_since(after.then, after.block)
        return min([unserved_since(branch, after) for branch in after.branches], default=behind)
    if isinstance(after, Each):
        return unserved_since(after.then, after.block)  # the list may be empty
    return inf if block is None or after is None else unserved_since(block.then, block.block)
